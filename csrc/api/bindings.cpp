// flash_ext._C: the fast entries to the operators, the shared checks, and what tests and tools look
// at.
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/utils/pybind.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <string>
#include <vector>

#include "../build_info.h"
#include "../path_choice.h"
#include "api.h"
#include "launch_words.h"
#include "prepared.h"
#include "tensors.h"

namespace py = pybind11;
using namespace py::literals;

namespace flash_ext {
namespace {

// ---- entries ------------------------------------------------------------------------------------

using OptionalInt = std::optional<int64_t>;

double resolved_scale(std::optional<double> scale, const Tensor& q) {
  if (scale.has_value()) return *scale;
  const int64_t head_dim = q.dim() == 0 ? 0 : q.sym_size(-1).guard_int(__FILE__, __LINE__);
  return 1.0 / std::sqrt(static_cast<double>(head_dim));
}

// Causal narrows the window to the right; a value that is out of range stays and is refused by the
// checks.
int64_t resolved_right(bool causal, int64_t window_size_right) {
  return causal && window_size_right >= -1 ? 0 : window_size_right;
}

CallArgs args_of(const Tensor& q, const OptionalTensor& cu_seqlens_q, const OptionalTensor& cu_seqlens_k,
                 OptionalInt max_seqlen_q, OptionalInt max_seqlen_k, std::optional<double> scale, bool causal,
                 int64_t window_size_left, int64_t window_size_right, bool deterministic,
                 const std::optional<std::string>& backend) {
  CallArgs a;
  a.cu_seqlens_q = cu_seqlens_q, a.cu_seqlens_k = cu_seqlens_k;
  a.max_seqlen_q = max_seqlen_q.value_or(0), a.max_seqlen_k = max_seqlen_k.value_or(0);
  a.scale = resolved_scale(scale, q);
  a.window_size_left = window_size_left, a.window_size_right = resolved_right(causal, window_size_right);
  a.deterministic = deterministic;
  if (backend.has_value()) a.backend = *backend;
  return a;
}

// Same result as torch.ops.flash_ext.fwd at less than half the cost: it enters the same dispatcher,
// but without boxing the arguments.
template <typename... Args>
FwdResult fwd(const Tensor& q, const Tensor& k, const Tensor& v, const Args&... args, bool want_lse) {
  CallArgs a = args_of(q, args...);
  a.want_lse = want_lse;
  return call_fwd(q, k, v, a);
}

template <typename... Args>
BwdResult bwd(const Tensor& dout, const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& out,
              const Tensor& lse, const OptionalTensor& dlse, const Args&... args) {
  CallArgs a = args_of(q, args...);
  a.dlse = dlse;
  return call_bwd(dout, q, k, v, out, lse, a);
}

// The same of flash_ext::fwd_cached.
FwdResult fwd_cached(const Tensor& q, const Tensor& k, const Tensor& v, const OptionalTensor& cu_seqlens_q,
                     const OptionalTensor& cu_seqlens_k, const OptionalTensor& seqused_k,
                     const OptionalTensor& block_table, OptionalInt max_seqlen_q, OptionalInt max_seqlen_k,
                     std::optional<double> scale, bool causal, int64_t window_size_left, int64_t window_size_right,
                     const OptionalTensor& slopes, const OptionalTensor& sinks, double softcap,
                     const std::optional<std::string>& backend, bool want_lse, const OptionalTensor& tree,
                     const OptionalTensor& k_descale, const OptionalTensor& v_descale) {
  CallArgs a = args_of(q, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, scale, causal, window_size_left,
                       window_size_right, false, backend);
  a.seqused_k = seqused_k, a.block_table = block_table;
  a.slopes = slopes, a.sinks = sinks, a.softcap = softcap;
  a.want_lse = want_lse, a.tree = tree;
  a.k_descale = k_descale, a.v_descale = v_descale;
  return FwdCachedOperator::call("flash_ext::fwd_cached", q, k, v, a);
}

// ---- calls with a mask or a bias that was prepared ------------------------------------------------

std::shared_ptr<PreparedCall> prepared_call(const Tensor& q, const Tensor& k, const CallArgs& args) {
  return std::make_shared<PreparedCall>(q, k, args);
}

// What such a call has of its own beside what args_of() takes.
struct OwnModifiers {
  const OptionalTensor& sinks;
  double softcap, dropout_p;
  const OptionalTensor& rng;

  void put(CallArgs& a) const { a.sinks = sinks, a.softcap = softcap, a.dropout_p = dropout_p, a.rng = rng; }
};

std::optional<FwdModResult> prepared_fwd(const PreparedCall& call, const Tensor& q, const Tensor& k, const Tensor& v,
                                         const OptionalTensor& cu_seqlens_q, const OptionalTensor& cu_seqlens_k,
                                         OptionalInt max_seqlen_q, OptionalInt max_seqlen_k,
                                         std::optional<double> scale, const OptionalTensor& sinks, double softcap,
                                         double dropout_p, const OptionalTensor& rng, bool want_row_max,
                                         bool deterministic, const std::optional<std::string>& backend, bool want_lse) {
  CallArgs a =
      args_of(q, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, scale, false, -1, -1, deterministic, backend);
  OwnModifiers{sinks, softcap, dropout_p, rng}.put(a);
  a.want_row_max = want_row_max, a.want_lse = want_lse;
  return call.forward(q, k, v, a);
}

std::optional<BwdResult> prepared_bwd(const PreparedCall& call, const Tensor& dout, const Tensor& q, const Tensor& k,
                                      const Tensor& v, const Tensor& out, const Tensor& lse, const OptionalTensor& dlse,
                                      const OptionalTensor& cu_seqlens_q, const OptionalTensor& cu_seqlens_k,
                                      OptionalInt max_seqlen_q, OptionalInt max_seqlen_k, std::optional<double> scale,
                                      const OptionalTensor& sinks, double softcap, double dropout_p,
                                      const OptionalTensor& rng, bool deterministic,
                                      const std::optional<std::string>& backend) {
  CallArgs a =
      args_of(q, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, scale, false, -1, -1, deterministic, backend);
  OwnModifiers{sinks, softcap, dropout_p, rng}.put(a);
  a.dlse = dlse;
  return call.backward(dout, q, k, v, out, lse, a);
}

// ---- plans, switches, records -------------------------------------------------------------------

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
    if (l.variant != ScoreVariant::kPlain) one["variant"] = word_of(l.variant);
    if (l.dq != DqMode::kNone) one["dq"] = word_of(l.dq);
    launches.append(one);
  }
  d["launches"] = launches;
  const Workspace& w = plan.workspace;
  py::dict parts;
  const std::pair<const char*, Part> named[] = {{"tile_counters", w.tile_counters},
                                                {"kv_partials", w.kv_partials},
                                                {"kv_stretches", w.kv_stretches},
                                                {"stats_portable", w.stats_portable},
                                                {"row_stats", w.row_stats},
                                                {"dq_semaphore", w.dq_semaphore},
                                                {"pool_words", w.pool_words},
                                                {"dq_accum", w.dq_accum},
                                                {"dk_partials", w.dk_partials},
                                                {"dv_partials", w.dv_partials},
                                                {"dbias_partials", w.dbias_partials},
                                                {"dslopes_partials", w.dslopes_partials},
                                                {"bias_rows", w.bias_rows}};
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

// What would be launched for a problem given by numbers alone; no tensor and, with every fact of
// the device given through switches, no GPU either.
py::dict plan_of_numbers(const std::string& direction_name, const std::string& dtype, int32_t batch, int64_t seqlen_q,
                         int64_t seqlen_k, int32_t num_heads, int32_t num_heads_k, int32_t head_dim, int32_t head_dim_v,
                         bool packed, int32_t window_size_left, int32_t window_size_right, bool deterministic,
                         const std::vector<std::string>& modifiers, const std::optional<std::string>& backend,
                         int device, const std::optional<std::array<int, 5>>& gpu, bool tma) {
  const Direction direction = direction_of(direction_name);
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
  static const int32_t no_cu_seqlens = 0;  // never read: plans look at metadata only
  Problem p;
  p.dtype = dtype_named(dtype);
  p.batch = batch;
  p.num_heads = num_heads;
  p.num_heads_k = num_heads_k;
  p.head_dim = head_dim;
  p.head_dim_v = head_dim_v;
  if (packed) {
    p.cu_seqlens_q = p.cu_seqlens_k = &no_cu_seqlens;
    p.total_q = seqlen_q;
    p.total_k = seqlen_k;
  } else {
    p.seqlen_q = static_cast<int32_t>(seqlen_q);
    p.seqlen_k = static_cast<int32_t>(seqlen_k);
    p.total_q = batch * seqlen_q;
    p.total_k = batch * seqlen_k;
  }
  set_window(p, window_size_left, window_size_right);
  p.softmax_scale = 1.f / std::sqrt(static_cast<float>(head_dim));
  p.tma_ready = tma;
  DeviceInfo info;
  if (gpu) {
    info.cc_major = (*gpu)[0];
    info.cc_minor = (*gpu)[1];
    info.num_sms = (*gpu)[2];
    info.smem_per_block = (*gpu)[3];
    info.l2_bytes = (*gpu)[4];
  } else {
    info = device_info(device);
  }
  if (!info.error.empty()) throw std::runtime_error(info.error);
  deterministic = deterministic || info.batch_invariant;
  // "fp8" and "mixed" name operands, and go with no modifier.
  const bool is_fp8 = modifiers == std::vector<std::string>{"fp8"},
             is_mixed = modifiers == std::vector<std::string>{"mixed"};
  const bool is_quantised = is_fp8 || is_mixed;
  if (is_quantised && direction == Direction::kBackward) throw py::value_error("backwards have no fp8 kernel");
  const NamedModifiers named(is_quantised ? std::vector<std::string>() : modifiers, p);

  Choice choice;
  const std::string text = backend.value_or("");
  const std::string error = parse_choice(text, choice);
  if (!error.empty()) throw py::value_error("backend: " + error);

  py::dict result;
  if (const Path* path = choose_path(p, info, choice.path)) {
    Request request{
        .direction = direction, .problem = p, .deterministic = deterministic, .constraints = choice.constraints};
    // Gradients of q, k and v where nothing but sinks is asked for are those of a plain call.
    const bool has_sinks_alone = modifiers.size() == 1 && modifiers[0] == "sinks";
    const bool is_plain = is_quantised || modifiers.empty() || (direction == Direction::kBackward && has_sinks_alone);
    if (!is_plain) request.modifiers = &named.modifiers;
    if (is_quantised) request.operands = is_mixed ? Operands::kMixed : Operands::kFp8;
    if (named.wants_dbias) request.dbias = &named.dbias;
    const Plan found = plan(request, info, path->arch);
    if (found.row.empty()) {
      if (is_quantised)
        throw py::value_error("backend " + std::string(path->name) + " has no fp8 kernel for this call");
      const std::string row(choice.constraints.row);
      throw py::value_error("backend " + std::string(path->name) + " has no row '" + row + "' for this call");
    }
    result = dict_of(found);
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

py::dict build_facts() {
  const BuildInfo& info = build_info();
  return py::dict("version"_a = info.version, "git_sha"_a = info.git_sha, "torch"_a = info.torch, "cuda"_a = info.cuda,
                  "archs"_a = info.archs, "flags"_a = info.flags, "variant"_a = info.variant);
}

// ---- the log of torch's own operators -----------------------------------------------------------

py::object* sdpa_log = nullptr;  // never freed, because a call may come while the interpreter ends

void tell_sdpa_log(const char* op, const char* reason, std::initializer_list<Tensor> tensors) {
  if (Py_IsInitialized() == 0) return;
  const py::gil_scoped_acquire gil;
  const py::object why = reason == nullptr ? py::object(py::none()) : py::object(py::str(reason));
  (*sdpa_log)(op, why, std::vector<Tensor>(tensors));
}

void set_sdpa_log(py::object function) {
  sdpa_log = new py::object(std::move(function));
  set_sdpa_listener(tell_sdpa_log);
}

}  // namespace
}  // namespace flash_ext

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  using namespace flash_ext;
  using torch::wrap_pybind_function;
  using torch::wrap_pybind_function_no_gil;

  m.doc() = "Kernels and operators of flash_ext; use the functions of the package instead of these.";
  m.attr("build_info") = build_facts();

  m.def("fwd",
        wrap_pybind_function_no_gil(fwd<OptionalTensor, OptionalTensor, OptionalInt, OptionalInt, std::optional<double>,
                                        bool, int64_t, int64_t, bool, std::optional<std::string>>),
        py::arg("q"), py::arg("k"), py::arg("v"), py::arg("cu_seqlens_q"), py::arg("cu_seqlens_k"),
        py::arg("max_seqlen_q"), py::arg("max_seqlen_k"), py::arg("scale"), py::arg("causal"),
        py::arg("window_size_left"), py::arg("window_size_right"), py::arg("deterministic"), py::arg("backend"),
        py::arg("want_lse") = true);
  m.def("fwd_cached", wrap_pybind_function_no_gil(fwd_cached));
  m.def("bwd",
        wrap_pybind_function_no_gil(bwd<OptionalTensor, OptionalTensor, OptionalInt, OptionalInt, std::optional<double>,
                                        bool, int64_t, int64_t, bool, std::optional<std::string>>),
        py::arg("dout"), py::arg("q"), py::arg("k"), py::arg("v"), py::arg("out"), py::arg("lse"), py::arg("dlse"),
        py::arg("cu_seqlens_q"), py::arg("cu_seqlens_k"), py::arg("max_seqlen_q"), py::arg("max_seqlen_k"),
        py::arg("scale"), py::arg("causal"), py::arg("window_size_left"), py::arg("window_size_right"),
        py::arg("deterministic"), py::arg("backend"));
  // The operators' arguments in their order, without `wide` and `want_lse`, and nothing but the checks.
  m.def("check_fwd", wrap_pybind_function(&Operator<void, 3, fields::kFwdChecked>::entry<check_fwd>));
  m.def("check_bwd", wrap_pybind_function(&Operator<void, 6, fields::kBwdChecked>::entry<check_bwd>));
  m.def("check_fwd_cached", wrap_pybind_function(&Operator<void, 3, fields::kCachedChecked>::entry<check_fwd_cached>));
  m.def("check_fwd_mod", wrap_pybind_function(&Operator<void, 3, fields::kFwdModChecked>::entry<check_fwd_mod>));
  m.def("check_bwd_mod", wrap_pybind_function(&Operator<void, 6, fields::kBwdModChecked>::entry<check_bwd_mod>));

  // The arguments are q, k and those of the operators up to the modifiers.
  m.def("prepared_call",
        wrap_pybind_function(&Operator<std::shared_ptr<PreparedCall>, 2, fields::kPrepared>::entry<prepared_call>));
  py::class_<PreparedCall, std::shared_ptr<PreparedCall>>(m, "PreparedCall")
      .def("watch", wrap_pybind_function(&PreparedCall::watch))
      .def("bind_stream", wrap_pybind_function(&PreparedCall::bind_stream))
      .def("set_missing_bias_dims", &PreparedCall::set_missing_bias_dims)
      .def("set_plain", &PreparedCall::set_plain)
      .def("fwd", wrap_pybind_function_no_gil(prepared_fwd))
      .def("bwd", wrap_pybind_function_no_gil(prepared_bwd));
  m.def("check_append_kv", wrap_pybind_function(&AppendOperator::entry<check_append_kv>));
  m.def("check_condense", wrap_pybind_function(&Operator<void, 1, fields::kCondense>::entry<check_condense>));

  m.def("path_names", &path_names);
  m.def("plan", &plan_of_numbers, py::arg("direction"), py::kw_only(), py::arg("dtype") = "bfloat16",
        py::arg("batch") = 1, py::arg("seqlen_q"), py::arg("seqlen_k"), py::arg("num_heads"), py::arg("num_heads_k"),
        py::arg("head_dim"), py::arg("head_dim_v"), py::arg("packed") = false, py::arg("window_size_left") = -1,
        py::arg("window_size_right") = -1, py::arg("deterministic") = false,
        py::arg("modifiers") = std::vector<std::string>(), py::arg("backend") = py::none(), py::arg("device") = 0,
        py::arg("gpu") = py::none(), py::arg("tma") = true);
  m.def("plan_rows", &rows_of_plans);
  m.def("done_launches", &launches_done);
  m.def("device_facts", &device_facts, py::arg("device") = 0);

  m.def("get_switch", [](const std::string& name) { return get_switch(required_switch(name)); });
  m.def("set_switch",
        [](const std::string& name, std::optional<int64_t> value) { set_switch(required_switch(name), value); });
  m.def("last_launch", &latest_launch, py::arg("of_this_thread") = false);
  m.def("sdpa_served", &sdpa_served);
  m.def("sdpa_returned", &sdpa_returned);
  m.def("set_sdpa_log", &set_sdpa_log);
  m.def("use_null_kernels_on_cpu", wrap_pybind_function(use_null_kernels_on_cpu));
}
