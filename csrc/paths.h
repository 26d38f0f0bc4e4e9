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

// A launch as it was asked of the GPU, for tests: kept while launches are recorded (path_choice.h).
struct DoneLaunch {
  const char* name;
  int64_t ctas;
  int threads, smem_bytes;
  bool early;
};
void note_launch(const DoneLaunch& launch);

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
std::string run_fwd(const FwdParams& p, const DeviceInfo& d);
std::string run_bwd(const BwdParams& p, const DeviceInfo& d);
std::string run_fwd_mod(const FwdParams& p, const Modifiers& m, const DeviceInfo& d);
std::string run_bwd_mod(const BwdParams& p, const BwdExtras& x, const DeviceInfo& d);
}  // namespace sm90

namespace sm80 {
std::string why_not_fwd(const Problem& p, const DeviceInfo& d);
std::string why_not_bwd(const Problem& p, const DeviceInfo& d);
std::string run_fwd(const FwdParams& p, const DeviceInfo& d);
std::string run_bwd(const BwdParams& p, const DeviceInfo& d);
std::string run_fwd_mod(const FwdParams& p, const Modifiers& m, const DeviceInfo& d);
std::string run_bwd_mod(const BwdParams& p, const BwdExtras& x, const DeviceInfo& d);
}  // namespace sm80

}  // namespace flash_ext
