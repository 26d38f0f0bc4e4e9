#include "path_choice.h"

#include <algorithm>
#include <array>
#include <atomic>
#include <charconv>
#include <cstring>
#include <limits>
#include <mutex>

#include "build_info.h"
#include "heuristics.h"

namespace flash_ext {

// ---- paths --------------------------------------------------------------------------------------

namespace {

std::string why_not_portable(const Problem& p, const DeviceInfo& d, bool fits) {
  if (d.cc_major < 8) {
    return "compute capability " + std::to_string(d.cc_major) + "." + std::to_string(d.cc_minor) +
           " is below 8.0 (Ampere)";
  }
  if (d.smem_per_block < kSmemLimitSmall) {
    return std::to_string(d.smem_per_block) + " bytes of shared memory per block, " + std::to_string(kSmemLimitSmall) +
           " needed";
  }
  if (!fits) {
    return "head_dim " + std::to_string(std::max(p.head_dim, p.head_dim_v)) + " > 256";
  }
  const int64_t longest = p.is_varlen() ? std::max(p.total_q, p.total_k) : std::max<int64_t>(p.seqlen_q, p.seqlen_k);
  if (longest > Problem::kMaxSeqlen) {
    return "sequence length " + std::to_string(longest) + " > " + std::to_string(Problem::kMaxSeqlen);
  }
  return {};
}

bool has_padded_size(const Problem& p) { return padded_head_dim(p.head_dim, p.head_dim_v) != 0; }
std::string why_not_sm80(const Problem& p, const DeviceInfo& d) { return why_not_portable(p, d, has_padded_size(p)); }

bool built_for_hopper() {
  static const bool found = std::strstr(build_info().archs, "9.0a") != nullptr;
  return found;
}

std::string why_not_sm90(const Problem& p, const DeviceInfo& d) {
  if (d.cc_major != 9 || d.cc_minor != 0) {
    const std::string found = std::to_string(d.cc_major) + "." + std::to_string(d.cc_minor);
    return "compute capability " + found + " is not 9.0 (Hopper)";
  }
  if (!built_for_hopper()) {
    return std::string("built for ") + build_info().archs + ", without 9.0a";
  }
  if (d.smem_per_block < kSmemLimitLarge) {
    return std::to_string(d.smem_per_block) + " bytes of shared memory per block, " + std::to_string(kSmemLimitLarge) +
           " needed";
  }
  return why_not_portable(p, d, has_padded_size(p) || has_latent_sizes(p));
}

}  // namespace

const std::vector<Path>& gpu_paths() {
  static const std::vector<Path> paths = {{"sm90", Arch::kSm90, why_not_sm90}, {"sm80", Arch::kSm80, why_not_sm80}};
  return paths;
}

std::string path_names() {
  std::string names;
  for (const Path& path : gpu_paths()) names += std::string(path.name) + ", ";
  return names + "cpu";
}

namespace {

std::string parse_constraint(std::string_view name, std::string_view value, Constraints& c) {
  if (name == "row") {
    const auto rows = row_names();
    if (std::none_of(rows.begin(), rows.end(), [&](const RowName& row) { return row.name == value; })) {
      return "no row '" + std::string(value) + "'; flash_ext._C.plan_rows() has them all";
    }
    c.row = value;
    return {};
  }
  int number = 0;
  const auto [end, error] = std::from_chars(value.data(), value.data() + value.size(), number);
  if (error != std::errc() || end != value.data() + value.size() || number < 0) {
    return std::string(name) + " takes a number of at least 0, not '" + std::string(value) + "'";
  }
  const bool is_yes_or_no = name == "wide_tiles" || name == "dq_pool" || name == "short_kernels";
  if (is_yes_or_no && number > 1) return std::string(name) + " takes 0 or 1";
  if (name == "kv_splits") {
    c.kv_splits = number;
  } else if (name == "gqa_splits") {
    c.gqa_splits = number;
  } else if (name == "q_splits") {
    if (number < 1 || number > 64) return "q_splits takes 1 to 64";
    c.q_splits = number;
  } else if (name == "fwd_block_m") {
    if (number != 128 && number != 192) return "fwd_block_m takes 128 or 192";
    c.fwd_block_m = number;
  } else if (name == "wide_tiles") {
    c.wide_tiles = number == 1;
  } else if (name == "dq_pool") {
    c.dq_pool = number == 1;
  } else if (name == "short_kernels") {
    c.short_kernels = number == 1;
  } else {
    return "no constraint '" + std::string(name) +
           "'; known: row, kv_splits, gqa_splits, q_splits, fwd_block_m, wide_tiles, dq_pool, short_kernels";
  }
  return {};
}

}  // namespace

std::string parse_choice(std::string_view text, Choice& choice) {
  for (bool is_first = true; !text.empty(); is_first = false) {
    const size_t end = std::min(text.find(' '), text.size());
    const std::string_view word = text.substr(0, end);
    text.remove_prefix(std::min(end + 1, text.size()));
    const size_t equals = word.find('=');
    if (equals != std::string_view::npos) {
      const std::string error = parse_constraint(word.substr(0, equals), word.substr(equals + 1), choice.constraints);
      if (!error.empty()) return error;
      continue;
    }
    const auto& paths = gpu_paths();
    const bool is_known =
        word == "cpu" || std::any_of(paths.begin(), paths.end(), [&](const Path& path) { return word == path.name; });
    if (!is_first || !is_known) return "no backend '" + std::string(word) + "'";
    choice.path = word;
  }
  return {};
}

const Path* choose_path(const Problem& p, const DeviceInfo& d, std::string_view wanted) {
  for (const Path& path : gpu_paths()) {
    if (!wanted.empty() && wanted != path.name) continue;
    if (path.why_not(p, d).empty()) return &path;
  }
  return nullptr;
}

std::string refusal_text(const Problem& p, const DeviceInfo& d) {
  std::string text;
  for (const Path& path : gpu_paths()) {
    const std::string reason = path.why_not(p, d);
    text += std::string(path.name) + " backend: " + (reason.empty() ? "accepts" : reason) + "; ";
  }
  return text + "cpu backend: the tensors are on a GPU";
}

// ---- switches -----------------------------------------------------------------------------------

namespace {

constexpr int64_t kUnset = std::numeric_limits<int64_t>::min();
constexpr std::array<const char*, kNumSwitches> kSwitchNames = {
    "compute_capability", "num_sms",         "smem_per_block", "unaligned",
    "skip_launch",        "record_launches", "capturing",      "batch_invariant"};

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

void record_second_plan(const Plan& plan) {
  if (record_of_this_thread) record_of_this_thread->then = plan;
  const std::lock_guard<std::mutex> lock(record_mutex);
  if (record_of_last_launch) record_of_last_launch->then = plan;
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
  if (device_index < 0 || device_index >= static_cast<int>(known.size())) return query_device(device_index);
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
  // Large tiles are in no other machine code, nor in PTX: Hopper then runs what any newer GPU does.
  if (info.cc_major == 9 && !built_for_hopper()) info.smem_per_block = std::min(info.smem_per_block, kSmemLimitSmall);
  info.batch_invariant = get_switch(Switch::kBatchInvariant) == 1;
  return info;
}

}  // namespace flash_ext
