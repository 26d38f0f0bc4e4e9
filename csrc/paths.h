// The kernel paths the host may choose from. No torch, no CUDA headers.
//
// Each path says in words why it refuses a request (an empty string means it accepts), and runs it.
// Launchers return an empty string on success, else the text of the CUDA error with the kernel's name.
#pragma once

#include <string>

#include "params.h"

namespace flash_ext {

// What the host knows about a device; read once per device by query_device().
struct DeviceInfo {
  int cc_major = 0;
  int cc_minor = 0;
  int num_sms = 0;
  int smem_per_block = 0;  // opt-in limit, bytes
  int l2_bytes = 0;
  std::string error;       // non-empty when the device could not be read
};

// One kernel launch as it would be done: what info, bench and tests print and assert on.
struct LaunchPlan {
  std::string path;
  std::string kernel;  // e.g. "fwd_sm80_hd128"
  int block_m = 0;
  int block_n = 0;
  int stages = 0;
  int threads = 0;
  int smem_bytes = 0;
  int64_t grid = 0;
};

DeviceInfo query_device(int device_index);  // csrc/device.cu

namespace sm80 {
std::string why_not_fwd(const Problem& p, const DeviceInfo& d);
std::string why_not_bwd(const Problem& p, const DeviceInfo& d);
BwdWorkspace bwd_workspace(const Problem& p, bool deterministic, const DeviceInfo& d);
LaunchPlan plan_fwd(const Problem& p, const DeviceInfo& d);
LaunchPlan plan_bwd(const Problem& p, bool deterministic, const DeviceInfo& d);
std::string run_fwd(const FwdParams& p, const DeviceInfo& d);
std::string run_bwd(const BwdParams& p, const DeviceInfo& d);
}  // namespace sm80

}  // namespace flash_ext
