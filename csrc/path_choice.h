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
  std::string (*why_not_fwd)(const Problem&, const DeviceInfo&);
  std::string (*why_not_bwd)(const Problem&, const DeviceInfo&);
  std::string (*run_fwd)(const FwdParams&, const DeviceInfo&);
  std::string (*run_bwd)(const BwdParams&, const DeviceInfo&);
  // With modifiers; the conditions of why_not_* hold for them, too.
  std::string (*run_fwd_mod)(const FwdParams&, const Modifiers&, const DeviceInfo&);
  std::string (*run_bwd_mod)(const BwdParams&, const BwdExtras&, const DeviceInfo&);

  std::string why_not(Direction direction, const Problem& p, const DeviceInfo& d) const {
    return direction == Direction::kForward ? why_not_fwd(p, d) : why_not_bwd(p, d);
  }
};

// The GPU paths in the order they are tried: the first that accepts runs.
const std::vector<Path>& gpu_paths();

// "sm90, sm80, cpu": every name that `path=` takes.
std::string path_names();
bool is_path_name(std::string_view name);

// The path that runs, or null: then `refusal_text` says why, path by path.
const Path* choose_path(Direction direction, const Problem& p, const DeviceInfo& d,
                        std::optional<std::string_view> wanted);
std::string refusal_text(Direction direction, const Problem& p, const DeviceInfo& d);

// The plan of a request on a path, with what test switches ask for.
Plan plan_on(const Path& path, Request request, const DeviceInfo& d);

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
  kHeadParts,          // this many parts of a key head in backwards that can have them (head_parts.h)
  kSplits,             // 0: never split keys; else into that many parts, in every plain forward
  kLowerTiles,         // 1 or 0: tiles of 128 queries in the sm90 forward always or never (sm90/tiles.h)
  kDqRing,             // 1 or 0: accumulators of the sm90 backward in a ring always or never (sm90/bwd_tiles.h)
  kShortKernels,       // 0: never what is for short sequences alone (DeviceInfo::short_kernels)
  kCapturing,          // 1 or 0: pretend that a CUDA graph is captured, or that none is
  kBatchInvariant,     // 1: DeviceInfo::batch_invariant; not for tests alone, flash_ext.set_batch_invariant() turns it
};
constexpr int kNumSwitches = 13;
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
};
void record_launch(const LaunchRecord& record);
std::optional<LaunchRecord> last_launch();                 // of any thread
std::optional<LaunchRecord> last_launch_of_this_thread();
std::vector<DoneLaunch> done_launches();  // since the latest record, of all threads

}  // namespace flash_ext
