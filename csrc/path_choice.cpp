#include "path_choice.h"

#include <array>
#include <atomic>
#include <limits>
#include <mutex>

namespace flash_ext {

// ---- paths --------------------------------------------------------------------------------------

const std::vector<Path>& gpu_paths() {
  static const std::vector<Path> paths = {
      {"sm90", Arch::kSm90, sm90::why_not_fwd, sm90::why_not_bwd, sm90::run_fwd, sm90::run_bwd, sm90::run_fwd_mod,
       sm90::run_bwd_mod},
      {"sm80", Arch::kSm80, sm80::why_not_fwd, sm80::why_not_bwd, sm80::run_fwd, sm80::run_bwd, sm80::run_fwd_mod,
       sm80::run_bwd_mod},
  };
  return paths;
}

std::string path_names() {
  std::string names;
  for (const Path& path : gpu_paths()) names += std::string(path.name) + ", ";
  return names + "cpu";
}

bool is_path_name(std::string_view name) {
  for (const Path& path : gpu_paths()) {
    if (name == path.name) return true;
  }
  return name == "cpu";
}

const Path* choose_path(Direction direction, const Problem& p, const DeviceInfo& d,
                        std::optional<std::string_view> wanted) {
  for (const Path& path : gpu_paths()) {
    if (wanted && *wanted != path.name) continue;
    if (path.why_not(direction, p, d).empty()) return &path;
  }
  return nullptr;
}

Plan plan_on(const Path& path, Request request, const DeviceInfo& d) {
  if (const auto forced = get_switch(Switch::kHeadParts)) request.gqa_splits = static_cast<int>(*forced);
  return plan(request, d, path.arch);
}

std::string refusal_text(Direction direction, const Problem& p, const DeviceInfo& d) {
  std::string text;
  for (const Path& path : gpu_paths()) {
    const std::string reason = path.why_not(direction, p, d);
    text += std::string(path.name) + " path: " + (reason.empty() ? "accepts" : reason) + "; ";
  }
  return text + "cpu path: the tensors are on a GPU";
}

// ---- switches -----------------------------------------------------------------------------------

namespace {

constexpr int64_t kUnset = std::numeric_limits<int64_t>::min();
constexpr std::array<const char*, kNumSwitches> kSwitchNames = {
    "compute_capability", "num_sms", "smem_per_block", "unaligned", "skip_launch", "record_launches",
    "head_parts", "splits", "lower_tiles", "dq_ring", "short_kernels", "capturing", "batch_invariant"};

struct SwitchStates {
  std::array<std::atomic<int64_t>, kNumSwitches> values;
  SwitchStates() {
    for (auto& value : values) value.store(kUnset, std::memory_order_relaxed);
  }
};

std::atomic<int64_t>& switch_state(Switch which) {
  static SwitchStates states;
  return states.values[static_cast<size_t>(which)];
}

std::mutex record_mutex;
std::optional<LaunchRecord> record_of_last_launch;
thread_local std::optional<LaunchRecord> record_of_this_thread;
std::vector<DoneLaunch> launches_since;

}  // namespace

std::optional<Switch> switch_by_name(std::string_view name) {
  for (int i = 0; i < kNumSwitches; ++i) {
    if (name == kSwitchNames[i]) return static_cast<Switch>(i);
  }
  return std::nullopt;
}

std::string switch_names() {
  std::string names;
  for (const char* name : kSwitchNames) names += (names.empty() ? "" : ", ") + std::string(name);
  return names;
}

std::optional<int64_t> get_switch(Switch which) {
  const int64_t value = switch_state(which).load(std::memory_order_relaxed);
  return value == kUnset ? std::nullopt : std::optional<int64_t>(value);
}

void set_switch(Switch which, std::optional<int64_t> value) {
  switch_state(which).store(value.value_or(kUnset), std::memory_order_relaxed);
}

void record_launch(const LaunchRecord& record) {
  record_of_this_thread = record;
  const std::lock_guard<std::mutex> lock(record_mutex);
  launches_since.clear();
  record_of_last_launch = record;
}

std::optional<LaunchRecord> last_launch() {
  const std::lock_guard<std::mutex> lock(record_mutex);
  return record_of_last_launch;
}

std::optional<LaunchRecord> last_launch_of_this_thread() { return record_of_this_thread; }

void note_launch(const DoneLaunch& launch) {
  constexpr size_t kMost = 64;
  if (get_switch(Switch::kRecordLaunches) != 1) return;
  const std::lock_guard<std::mutex> lock(record_mutex);
  if (launches_since.size() < kMost) launches_since.push_back(launch);
}

std::vector<DoneLaunch> done_launches() {
  const std::lock_guard<std::mutex> lock(record_mutex);
  return launches_since;
}

// ---- devices ------------------------------------------------------------------------------------

namespace {

// A failed query is not kept: the next call asks again.
DeviceInfo queried_once(int device_index) {
  static std::array<std::atomic<const DeviceInfo*>, 128> known{};
  if (device_index < 0 || device_index >= static_cast<int>(known.size()))
    return query_device(device_index);
  auto& slot = known[static_cast<size_t>(device_index)];
  if (const DeviceInfo* info = slot.load(std::memory_order_acquire)) return *info;
  const DeviceInfo info = query_device(device_index);
  if (info.error.empty()) {
    const DeviceInfo* mine = new DeviceInfo(info);  // lives as long as the process
    const DeviceInfo* expected = nullptr;
    if (!slot.compare_exchange_strong(expected, mine, std::memory_order_acq_rel)) delete mine;
  }
  return info;
}

}  // namespace

DeviceInfo device_info(int device_index) {
  const auto cc = get_switch(Switch::kComputeCapability);
  const auto sms = get_switch(Switch::kNumSms);
  const auto smem = get_switch(Switch::kSmemPerBlock);
  DeviceInfo info;
  if (!(cc && sms && smem)) info = queried_once(device_index);  // else no GPU is needed at all
  if (cc) {
    info.cc_major = static_cast<int>(*cc / 10);
    info.cc_minor = static_cast<int>(*cc % 10);
  }
  if (sms) info.num_sms = static_cast<int>(*sms);
  if (smem) info.smem_per_block = static_cast<int>(*smem);
  if (const auto splits = get_switch(Switch::kSplits)) info.splits = static_cast<int>(*splits);
  if (const auto lower = get_switch(Switch::kLowerTiles)) info.lower_tiles = static_cast<int>(*lower);
  if (const auto ring = get_switch(Switch::kDqRing)) info.dq_ring = static_cast<int>(*ring);
  if (const auto kernels = get_switch(Switch::kShortKernels)) info.short_kernels = static_cast<int>(*kernels);
  info.batch_invariant = get_switch(Switch::kBatchInvariant) == 1;
  return info;
}

}  // namespace flash_ext
