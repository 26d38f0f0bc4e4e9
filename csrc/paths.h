// The kernel paths the host may choose from. No torch, no CUDA headers.
//
// Each path says in words why it refuses a request (an empty string means it accepts), and runs it.
// Launchers return an empty string on success, else the text of the CUDA error with the kernel's name.
#pragma once

#include <string>

#include "modifiers.h"
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
  int splits = -1;         // of the keys, for tests: 0 never, else that many wherever it is possible; -1: as it pays
  int dq_ring = -1;        // of the sm90 backward, for tests: 0 never, 1 wherever it is possible; -1: as it pays
  int lower_tiles = -1;    // of the sm90 forwards, for tests: 0 never, 1 always; -1: as it pays
  // For tests, 0: never what is for short sequences alone (short_tiles.h, sm90::has_whole_keys()); -1: wherever it pays.
  int short_kernels = -1;
  // Nothing that changes bits is chosen by how much else a call holds; what tests ask for above goes first.
  bool batch_invariant = false;
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
  int splits = 1;  // parts of the keys, which a second kernel puts together
};

// csrc/device.cu
DeviceInfo query_device(int device_index);
// Makes a context of the device current in this thread: its primary one, unless one of its own is current already.
// Launches bind it by themselves, but calls of the driver (tensor maps) fail in a thread that has none.
std::string bind_context(int device_index);

// Bring masks into the form the kernels read (passes/mask_passes.cuh); errors as of launchers.
std::string pack_mask(const BoolView& x, uint32_t* words, int num_words, bool fill, void* stream);
std::string group_mask(const uint32_t* words, uint32_t* any, uint32_t* all, int64_t heads, int rows, int num_words,
                       void* stream);
std::string pack_blocks(const BoolView& x, uint32_t* words, int granule_rows, int num_words, int rows_per_block,
                        int cols_per_block, void* stream);
std::string group_labels(const int32_t* ids, int32_t* groups, int64_t rows, int64_t length, void* stream);
std::string group_intervals(const int32_t* bounds, int32_t* groups, int64_t rows, int64_t length, int count,
                            void* stream);

namespace sm90 {
std::string why_not_fwd(const Problem& p, const DeviceInfo& d);
std::string why_not_bwd(const Problem& p, const DeviceInfo& d);
int64_t fwd_workspace(const Problem& p, const DeviceInfo& d);
BwdWorkspace bwd_workspace(const Problem& p, bool deterministic, const DeviceInfo& d);
LaunchPlan plan_fwd(const Problem& p, const DeviceInfo& d);
LaunchPlan plan_bwd(const Problem& p, bool deterministic, const DeviceInfo& d);
std::string run_fwd(const FwdParams& p, const DeviceInfo& d);
std::string run_bwd(const BwdParams& p, const DeviceInfo& d);
int64_t fwd_mod_workspace(const Problem& p, const DeviceInfo& d);
BwdWorkspace bwd_mod_workspace(const Problem& p, bool deterministic, const DeviceInfo& d);
LaunchPlan plan_fwd_mod(const Problem& p, const Modifiers& m, const DeviceInfo& d);
LaunchPlan plan_bwd_mod(const Problem& p, bool deterministic, const BwdExtras& x, const DeviceInfo& d);
std::string run_fwd_mod(const FwdParams& p, const Modifiers& m, const DeviceInfo& d);
std::string run_bwd_mod(const BwdParams& p, const BwdExtras& x, const DeviceInfo& d);
}  // namespace sm90

namespace sm80 {
std::string why_not_fwd(const Problem& p, const DeviceInfo& d);
std::string why_not_bwd(const Problem& p, const DeviceInfo& d);
int64_t fwd_workspace(const Problem& p, const DeviceInfo& d);
BwdWorkspace bwd_workspace(const Problem& p, bool deterministic, const DeviceInfo& d);
LaunchPlan plan_fwd(const Problem& p, const DeviceInfo& d);
LaunchPlan plan_bwd(const Problem& p, bool deterministic, const DeviceInfo& d);
std::string run_fwd(const FwdParams& p, const DeviceInfo& d);
std::string run_bwd(const BwdParams& p, const DeviceInfo& d);
LaunchPlan plan_fwd_mod(const Problem& p, const Modifiers& m, const DeviceInfo& d);
LaunchPlan plan_bwd_mod(const Problem& p, bool deterministic, const BwdExtras& x, const DeviceInfo& d);
std::string run_fwd_mod(const FwdParams& p, const Modifiers& m, const DeviceInfo& d);
std::string run_bwd_mod(const BwdParams& p, const BwdExtras& x, const DeviceInfo& d);
int64_t fwd_mod_workspace(const Problem& p, const DeviceInfo& d);
BwdWorkspace bwd_mod_workspace(const Problem& p, bool deterministic, const DeviceInfo& d);
}  // namespace sm80

}  // namespace flash_ext
