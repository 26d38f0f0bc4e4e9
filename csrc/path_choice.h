// Which kernel path serves a call, on which device, and the switches that tests turn. No torch, no
// CUDA.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "plan.h"

namespace flash_ext {

struct Path {
  const char* name;
  Arch arch;
  // In words why it cannot run a call; empty where it can.
  std::string (*why_not)(const Problem&, const DeviceInfo&);
};

// One key head of latents, whose first columns are the value: beyond the other limits, and of caches alone.
inline constexpr int kLatentHeadDim = 576, kLatentHeadDimV = 512;
inline bool has_latent_sizes(const Problem& p) {
  return p.head_dim == kLatentHeadDim && p.head_dim_v == kLatentHeadDimV && p.num_heads_k == 1;
}

// The GPU paths in the order they are tried: the first that accepts runs.
const std::vector<Path>& gpu_paths();

// "sm90, sm80, cpu": every name that `backend=` takes.
std::string path_names();

// What `backend=` says: a name, constraints, or both, as in "sm90", "kv_splits=4" and "sm90 row=sm90.bwd.dq_pool
// dq_pool=1".
struct Choice {
  std::string_view path;  // empty: any
  Constraints constraints;
};
// An empty string, or what is wrong with the text, of which `choice` keeps views.
std::string parse_choice(std::string_view text, Choice& choice);

// The path that runs, or null: then `refusal_text` says why, path by path. `wanted`: its name, or empty.
const Path* choose_path(const Problem& p, const DeviceInfo& d, std::string_view wanted);
std::string refusal_text(const Problem& p, const DeviceInfo& d);

// Facts of one device with the test switches applied; queried once per device and process, and not
// at all when switches give compute capability, SMs and shared memory.
DeviceInfo device_info(int device_index);

// Switches for tests and benchmarks, but for the last one; unset unless a test sets them, never read from the
// environment.
enum class Switch {
  kComputeCapability,  // e.g. 86: pretend to be this architecture when choosing
  kNumSms,             // pretend to have this many SMs
  kSmemPerBlock,       // pretend to have this much shared memory, bytes
  kUnaligned,          // 1: report every tensor as unaligned, which selects the element-wise loader
  kSkipLaunch,         // 1: do everything except the launch
  kRecordLaunches,     // 1: remember the plan of the latest launch
  kCapturing,          // 1 or 0: pretend that a CUDA graph is captured, or that none is
  kBatchInvariant,  // 1: DeviceInfo::batch_invariant; not for tests alone, flash_ext.serving.set_batch_invariant() turns it
};
constexpr int kNumSwitches = 8;
std::optional<Switch> switch_by_name(std::string_view name);
std::string switch_names();
std::optional<int64_t> get_switch(Switch which);
void set_switch(Switch which, std::optional<int64_t> value);

// The latest launch while kRecordLaunches is set.
struct LaunchRecord {
  Direction direction = Direction::kForward;
  Plan plan;
  bool deterministic = false;
  bool aligned = false;  // every tensor takes the 16-byte loader
  std::optional<Plan> then = {};  // of a backward whose other gradients have a plan of their own
};
void record_launch(const LaunchRecord& record);
void record_second_plan(const Plan& plan);  // of the call that this thread has recorded
std::optional<LaunchRecord> last_launch();  // of any thread
std::optional<LaunchRecord> last_launch_of_this_thread();
std::vector<DoneLaunch> done_launches();  // since the latest record, of all threads

}  // namespace flash_ext
