// What the host knows of a device, and the passes that prepare masks. No torch, no CUDA headers.
#pragma once

#include <optional>
#include <string>
#include <string_view>

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
  // Nothing that changes bits is chosen by how much else a call holds; constraints of a call go first.
  bool batch_invariant = false;
};

// What a call asks of the choice of its kernels, for tests and tuning. Empty: as it pays.
struct Constraints {
  std::string_view row;            // of the plan's tables (plan.h), in its own direction
  std::optional<int> kv_splits;    // of the keys of a plain forward; 0: never split
  std::optional<int> gqa_splits;   // of the query heads of a key head in a plain backward, where it divides them
  std::optional<int> q_splits;  // of the queries of a block of keys, in Hopper's backwards with modifiers or few keys
  std::optional<int> fwd_block_m;  // 128 or 192 queries a tile, in forwards for Hopper that have both
  std::optional<bool> wide_tiles;  // more keys a tile, in kernels for Hopper with modifiers that have both
  std::optional<bool> dq_pool;  // in the plain fused backward for Hopper, which such a call then takes
  bool short_kernels = true;  // what is for short sequences alone (short_tiles.h, sm90::has_whole_keys())
};

// A launch as it was asked of the GPU, for tests: kept while launches are recorded (path_choice.h).
struct DoneLaunch {
  const char* name;
  int64_t ctas;
  int threads, smem_bytes;
  bool pdl;
};
void note_launch(const DoneLaunch& launch);

// csrc/device.cu
DeviceInfo query_device(int device_index);
// Makes a context of the device current in this thread: its primary one, unless one of its own is current already.
// Launches bind it by themselves, but calls of the driver (tensor maps) fail in a thread that has none.
std::string bind_context(int device_index);

// Bring masks into the form the kernels read (passes/mask_passes.cuh); errors as of launchers.
std::string pack_mask(const BoolView& x, uint32_t* words, int num_words, bool fill, void* stream);
std::string group_mask(uint32_t* words, int64_t heads, int rows, int num_words, bool fill, void* stream);
std::string pack_blocks(const BoolView& x, uint32_t* words, int granule_rows, int num_words, int rows_per_block,
                        int cols_per_block, void* stream);
std::string group_document_ids(const int32_t* ids, int32_t* groups, int64_t rows, int64_t length, void* stream);
std::string group_intervals(const int32_t* bounds, int32_t* groups, int64_t rows, int64_t length, int count,
                            void* stream);

}  // namespace flash_ext
