// What tests and tools see of plans: that of a call in words, those of the latest launches, and the switches that tests
// turn.
#include "plans.h"

#include <pybind11/stl.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <optional>
#include <stdexcept>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "../path_choice.h"
#include "tensors.h"

namespace py = pybind11;
using namespace py::literals;

namespace flash_ext {
namespace {

// ---- names --------------------------------------------------------------------------------------

const char* word_of(ScoreVariant v) {
  switch (v) {
    case ScoreVariant::kPlain: return "plain";
    case ScoreVariant::kHide: return "hide";
    case ScoreVariant::kDrop: return "drop";
    case ScoreVariant::kSlopes: return "slopes";
    case ScoreVariant::kCap: return "cap";
    case ScoreVariant::kExponents: return "exponents";
    case ScoreVariant::kBias: return "bias";
    case ScoreVariant::kLooseBias: return "loose_bias";
    case ScoreVariant::kFloatBias: return "float_bias";
    case ScoreVariant::kWords: return "words";
    case ScoreVariant::kAdd: return "add";
    case ScoreVariant::kAddFloat: return "add_float";
    case ScoreVariant::kAddDrop: return "add_drop";
    case ScoreVariant::kChange: return "change";
    case ScoreVariant::kAll: return "all";
    case ScoreVariant::kMixed: return "mixed";
    case ScoreVariant::kHalf: return "half";
    case ScoreVariant::kStretches: return "stretches";
    case ScoreVariant::kLatents: return "latents";
  }
  return "?";
}

const char* word_of(DqMode m) {
  switch (m) {
    case DqMode::kNone: return "none";
    case DqMode::kAtomic: return "atomic";
    case DqMode::kOrdered: return "ordered";
    case DqMode::kPool: return "pool";
    case DqMode::kStored: return "stored";
    case DqMode::kElsewhere: return "elsewhere";
    case DqMode::kDivided: return "divided";
  }
  return "?";
}

// ---- plans --------------------------------------------------------------------------------------

void put_launch(py::dict& d, const Launch& l) {
  d["block_m"] = l.block_m;
  d["block_n"] = l.block_n;
  d["stages"] = l.stages;
  d["threads"] = l.threads;
  d["smem_bytes"] = l.smem_bytes;
  d["grid"] = l.ctas;
}

py::dict dict_of(const Plan& plan) {
  const std::string kernel = name_of(plan);
  py::dict d;
  d["backend"] = kernel.find("_sm90") == std::string::npos ? "sm80" : "sm90";
  d["kernel"] = kernel;
  put_launch(d, plan.main_launch());
  d["splits"] = plan.kv_splits;
  d["gqa_splits"] = plan.gqa_splits;
  d["q_splits"] = plan.q_splits;
  d["row"] = plan.row;
  d["evidence"] = name_of(plan.evidence);
  py::list launches;
  for (const Launch& l : plan.steps()) {
    py::dict one;
    one["kernel"] = name_of(l);
    one["grid"] = l.ctas;
    one["threads"] = l.threads;
    if (l.block_m > 0) {
      put_launch(one, l);
      one["tiles"] = l.tiles;
      one["dynamic"] = l.dynamic;
    }
    one["pdl"] = l.pdl;
    if (l.unit_heads > 1) one["unit_heads"] = l.unit_heads;
    if (l.variant != ScoreVariant::kPlain) one["variant"] = word_of(l.variant);
    if (l.dq != DqMode::kNone) one["dq"] = word_of(l.dq);
    if (l.makes_stats) one["makes_stats"] = true;
    if (l.rows.above > 0 || l.rows.upto != INT32_MAX) {
      const bool has_end = l.rows.upto != INT32_MAX;
      one["rows"] = py::make_tuple(l.rows.above + 1, has_end ? py::object(py::int_(l.rows.upto)) : py::none());
    }
    launches.append(one);
  }
  d["launches"] = launches;
  const Workspace& w = plan.workspace;
  py::dict parts;
#define FLASH_EXT_PART(name) std::pair<const char*, Part>(#name, w.name)
  const std::pair<const char*, Part> named[] = {
      FLASH_EXT_PART(tile_counters),  FLASH_EXT_PART(kv_partials),      FLASH_EXT_PART(kv_stretches),
      FLASH_EXT_PART(stats_portable), FLASH_EXT_PART(row_stats),        FLASH_EXT_PART(dq_semaphore),
      FLASH_EXT_PART(pool_words),     FLASH_EXT_PART(dq_accum),         FLASH_EXT_PART(dk_partials),
      FLASH_EXT_PART(stream_k_sums),  FLASH_EXT_PART(stream_k_words),   FLASH_EXT_PART(dv_partials),
      FLASH_EXT_PART(dbias_partials), FLASH_EXT_PART(dslopes_partials), FLASH_EXT_PART(bias_rows)};
#undef FLASH_EXT_PART
  for (const auto& [name, part] : named) {
    if (part) parts[name] = part.bytes;
  }
  d["workspace"] = parts;
  d["workspace_bytes"] = w.bytes;
  return d;
}

Direction direction_of(const std::string& name) {
  if (name != "fwd" && name != "bwd") throw py::value_error("direction must be 'fwd' or 'bwd', got " + name);
  return name == "fwd" ? Direction::kForward : Direction::kBackward;
}

DType dtype_named(const std::string& name) {
  if (name == "float16") return DType::kFloat16;
  if (name == "bfloat16") return DType::kBFloat16;
  throw py::value_error("dtype must be 'float16' or 'bfloat16', got " + name);
}

// A cache in words: its layout ("pages", "entries" or "rows"), its elements ("", "e4m3" or "int8"), and the keys of a
// page.
using CacheWords = std::tuple<std::string, std::string, int32_t>;

static const int32_t kSomething = 0;  // never read: plans look at metadata only

// `room`: keys of a sequence at most, of packed rows those of all sequences.
KvCache cache_of(const CacheWords& words, int64_t room, int32_t batch) {
  const auto& [layout, elements, page_size] = words;
  KvCache c;
  c.seqused_k = &kSomething;
  if (room < 1) throw py::value_error("a cache has room for at least 1 key");
  const int64_t page = layout == "pages" ? page_size : room;
  if (layout == "pages") {
    if (page_size < 1) throw py::value_error("a page holds at least 1 key");
    c.block_table = &kSomething;
    room = (room + page - 1) / page * page;
  } else if (layout != "entries" && layout != "rows") {
    throw py::value_error("a cache has 'pages', 'entries' or 'rows', got " + layout);
  }
  c.max_keys = clamp_to_int32(room);
  if (layout == "rows") {
    if (!elements.empty()) throw py::value_error("a cache of 8 bits lies in pages or entries");
    return c;
  }
  c.num_pages = clamp_to_int32(batch * (room / std::max<int64_t>(page, 1)));
  c.page_size = Divisor(static_cast<uint32_t>(std::clamp<int64_t>(page, 1, 1 << 30)));
  return c;
}

CacheType cache_type_named(const std::string& name) {
  if (name.empty()) return CacheType::k16Bit;
  if (name == "e4m3") return CacheType::kE4m3;
  if (name == "int8") return CacheType::kInt8;
  throw py::value_error("elements of a cache must be 'e4m3' or 'int8', or of 16 bits, got " + name);
}

// Those that one word names, which goes with no modifier: as quantize_fp8 makes them, as they may be in e4m3, mixed.
Operands operands_named(const std::vector<std::string>& words) {
  if (words.size() != 1) return Operands::k16Bit;
  if (words[0] == "fp8") return Operands::kSmallFp8;
  if (words[0] == "any_fp8") return Operands::kFp8;
  return words[0] == "mixed" ? Operands::kMixed : Operands::k16Bit;
}

DeviceInfo device_named(int device, const std::optional<std::array<int, 5>>& gpu) {
  if (!gpu) {
    DeviceInfo info = device_info(device);
    if (!info.error.empty()) throw std::runtime_error(info.error);
    return info;
  }
  DeviceInfo info;
  info.cc_major = (*gpu)[0];
  info.cc_minor = (*gpu)[1];
  info.num_sms = (*gpu)[2];
  info.smem_per_block = (*gpu)[3];
  info.l2_bytes = (*gpu)[4];
  return info;
}

void check_cache(const CacheWords& words, const Problem& p, bool is_backward) {
  const auto& [layout, elements, page_size] = words;
  if (is_backward) throw py::value_error("attention over a cache has no backward");
  if (layout == "rows" && !p.is_varlen()) throw py::value_error("rows of a cache go with packed queries");
  if (!elements.empty() && (p.head_dim % 16 != 0 || p.head_dim_v % 16 != 0)) {
    throw py::value_error("head_dim of a cache of 8 bits must be a multiple of 16");
  }
}

// Lengths of queries and keys: of a sequence, or of all packed ones.
void set_rows(Problem& p, bool packed, int64_t queries, int64_t keys) {
  if (packed) {
    p.cu_seqlens_q = p.cu_seqlens_k = &kSomething;
    p.total_q = queries;
    p.total_k = keys;
  } else {
    p.seqlen_q = static_cast<int32_t>(queries);
    p.seqlen_k = static_cast<int32_t>(keys);
    p.total_q = p.batch * queries;
    p.total_k = p.batch * keys;
  }
}

// Raises where what is asked for does not go together.
void check_request(const Request& r, const NamedModifiers& named) {
  const bool is_backward = r.direction == Direction::kBackward, is_fp8 = r.operands != Operands::k16Bit;
  const bool in_16_bits = r.cache != nullptr && r.cache_type == CacheType::k16Bit;
  if (r.has_latents && (is_backward || !in_16_bits)) {
    throw py::value_error("head_dim 576 of which v has 512 is that of a cache of latents: a forward over 16 bits");
  }
  if (is_fp8 && is_backward) throw py::value_error("backwards have no fp8 kernel");
  if (is_fp8 && r.cache != nullptr) {
    throw py::value_error("the fp8 forward has no cache; words for one are e4m3 and int8");
  }
  if (r.has_own_lengths && !is_fp8) {
    throw py::value_error(
        "seqused goes with fp8, any_fp8 or mixed; over a cache every sequence has a length of its own");
  }
  if (r.has_slot_factors && (r.cache == nullptr || in_16_bits)) {
    throw py::value_error("factors of slots go with a cache of 8 bits");
  }
  if (r.wide && !is_backward) {
    throw py::value_error("wide goes with bwd: forwards have one plan for an out of any dtype");
  }
  if (!r.need_qkv && !(is_backward && named.wants_gradient())) {
    throw py::value_error("without gradients of q, k and v a backward must want another one, as bias_gradient");
  }
}

Plan found_plan(const Request& request, const DeviceInfo& info, const Path& path) {
  const Plan found = plan(request, info, path.arch);
  if (!found.row.empty()) return found;
  const std::string row(request.constraints.row), backend = "backend " + std::string(path.name);
  if (!row.empty()) throw py::value_error(backend + " has no row '" + row + "' for this call");
  const bool is_fp8 = request.operands != Operands::k16Bit;
  throw py::value_error(backend + " has no " + (is_fp8 ? "fp8 " : "") + "kernel for this call");
}

// What would be launched for a problem given by numbers alone; no tensor and, with every fact of
// the device given through switches, no GPU either.
py::dict plan_of_numbers(const std::string& direction_name, const std::string& dtype, int32_t batch, int64_t seqlen_q,
                         int64_t seqlen_k, int32_t num_heads, int32_t num_heads_k, int32_t head_dim, int32_t head_dim_v,
                         bool packed, int32_t window_size_left, int32_t window_size_right, bool deterministic,
                         const std::vector<std::string>& modifiers, const std::optional<std::string>& backend,
                         int device, const std::optional<std::array<int, 5>>& gpu, bool tma, bool need_qkv,
                         const std::optional<CacheWords>& cache_words, const std::array<int64_t, 2>& max_seqlen,
                         bool own_lengths, bool slot_factors, bool wide) {
  const Direction direction = direction_of(direction_name);
  const bool is_backward = direction == Direction::kBackward;
  if (num_heads == 0 && num_heads_k == 0) {  // nothing runs, as without batch entries
    batch = 0;
    num_heads = num_heads_k = 1;
  }
  const int32_t least = std::min({num_heads, num_heads_k, head_dim, head_dim_v});
  if (least < 1 || std::min<int64_t>({batch, seqlen_q, seqlen_k}) < 0 || num_heads % num_heads_k != 0) {
    throw py::value_error(
        "head sizes must be at least 1, batch, heads and lengths at least 0, and num_heads a multiple "
        "of num_heads_k");
  }
  Problem p;
  p.dtype = dtype_named(dtype);
  p.batch = batch;
  p.num_heads = num_heads;
  p.num_heads_k = num_heads_k;
  p.head_dim = head_dim;
  p.head_dim_v = head_dim_v;
  set_rows(p, packed, seqlen_q, seqlen_k);
  KvCache cache;
  if (cache_words) {
    check_cache(*cache_words, p, is_backward);
    cache = cache_of(*cache_words, seqlen_k, batch);
    set_rows(p, packed, seqlen_q, cache.max_keys);
  }
  set_window(p, window_size_left, window_size_right);
  p.scale = 1.f / std::sqrt(static_cast<float>(head_dim));
  p.tma_ready = tma;

  const DeviceInfo info = device_named(device, gpu);
  const Operands operands = operands_named(modifiers);
  const bool is_fp8 = operands != Operands::k16Bit;
  const NamedModifiers named(is_fp8 ? std::vector<std::string>() : modifiers, p, cache_words.has_value());
  Request request{.direction = direction,
                  .problem = p,
                  .operands = operands,
                  .has_own_lengths = own_lengths,
                  .deterministic = deterministic || info.batch_invariant,
                  .wide = wide,
                  .need_qkv = need_qkv,
                  .dbias = named.wants_dbias ? &named.dbias : nullptr,
                  .dslopes = named.wants_dslopes ? &named.dslopes : nullptr,
                  .cache = cache_words ? &cache : nullptr,
                  .cache_type = cache_words ? cache_type_named(std::get<1>(*cache_words)) : CacheType::k16Bit,
                  .has_slot_factors = slot_factors,
                  .has_latents = has_latent_sizes(p),
                  .most_queries = cache_words ? max_seqlen[0] : 0,
                  .most_keys = cache_words ? max_seqlen[1] : 0};
  check_request(request, named);
  Choice choice;
  const std::string text = backend.value_or("");
  const std::string error = parse_choice(text, choice);
  if (!error.empty()) throw py::value_error("backend: " + error);
  request.constraints = choice.constraints;
  // Where nothing but sinks is asked for, gradients of q, k and v are those of a plain call, and so are the kernels
  // over a cache.
  const bool has_sinks_alone = modifiers.size() == 1 && modifiers[0].starts_with("sinks");
  const bool runs_plain =
      is_fp8 || modifiers.empty() || (has_sinks_alone && (is_backward ? need_qkv : cache_words.has_value()));
  if (!runs_plain) request.modifiers = &named.modifiers;

  py::dict result;
  if (const Path* path = choose_path(p, info, choice.path)) {
    result = dict_of(found_plan(request, info, *path));
    if (runs_plain && named.wants_dsinks) {
      request.modifiers = &named.modifiers;
      request.need_qkv = false;
      request.constraints.row = {};
      result["then"] = dict_of(plan(request, info, path->arch));
    }
  } else {
    result["backend"] = py::none();
  }
  py::dict reasons;
  for (const Path& path : gpu_paths()) reasons[path.name] = path.why_not(p, info);
  result["reasons"] = reasons;
  return result;
}

Switch required_switch(const std::string& name) {
  const auto which = switch_by_name(name);
  if (!which) throw py::value_error("unknown switch '" + name + "'; known: " + switch_names());
  return *which;
}

py::object latest_launch(bool of_this_thread) {
  const auto record = of_this_thread ? last_launch_of_this_thread() : last_launch();
  if (!record) return py::none();
  py::dict d = dict_of(record->plan);
  if (record->then) d["then"] = dict_of(*record->then);
  d["direction"] = record->direction == Direction::kForward ? "fwd" : "bwd";
  d["deterministic"] = record->deterministic;
  d["aligned"] = record->aligned;
  return d;
}

// What has been asked of the GPU since the latest record.
py::list launches_done() {
  py::list launches;
  for (const DoneLaunch& l : done_launches()) {
    launches.append(py::dict("name"_a = l.name, "grid"_a = l.ctas, "threads"_a = l.threads,
                             "smem_bytes"_a = l.smem_bytes, "pdl"_a = l.pdl));
  }
  return launches;
}

py::list rows_of_plans() {
  py::list rows;
  for (const RowName& row : row_names()) {
    rows.append(py::make_tuple(row.arch == Arch::kSm90 ? "sm90" : "sm80", row.name, name_of(row.evidence)));
  }
  return rows;
}

py::dict device_facts(int device) {
  const DeviceInfo info = device_info(device);
  if (!info.error.empty()) throw std::runtime_error(info.error);
  return py::dict("compute_capability"_a = py::make_tuple(info.cc_major, info.cc_minor), "num_sms"_a = info.num_sms,
                  "smem_per_block"_a = info.smem_per_block, "l2_bytes"_a = info.l2_bytes);
}

}  // namespace

void bind_plans(py::module_& m) {
  m.def("path_names", &path_names);
  m.def("plan", &plan_of_numbers, py::arg("direction"), py::kw_only(), py::arg("dtype") = "bfloat16",
        py::arg("batch") = 1, py::arg("seqlen_q"), py::arg("seqlen_k"), py::arg("num_heads"), py::arg("num_heads_k"),
        py::arg("head_dim"), py::arg("head_dim_v"), py::arg("packed") = false, py::arg("window_size_left") = -1,
        py::arg("window_size_right") = -1, py::arg("deterministic") = false,
        py::arg("modifiers") = std::vector<std::string>(), py::arg("backend") = py::none(), py::arg("device") = 0,
        py::arg("gpu") = py::none(), py::arg("tma") = true, py::arg("need_qkv") = true, py::arg("cache") = py::none(),
        py::arg("max_seqlen") = std::array<int64_t, 2>{}, py::arg("own_lengths") = false,
        py::arg("slot_factors") = false, py::arg("wide") = false);
  m.def("plan_rows", &rows_of_plans);
  m.def("done_launches", &launches_done);
  m.def("device_facts", &device_facts, py::arg("device") = 0);

  m.def("get_switch", [](const std::string& name) { return get_switch(required_switch(name)); });
  m.def("set_switch",
        [](const std::string& name, std::optional<int64_t> value) { set_switch(required_switch(name), value); });
  m.def("last_launch", &latest_launch, py::arg("of_this_thread") = false);
}

}  // namespace flash_ext
