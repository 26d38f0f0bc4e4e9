// flash_ext._C: the fast entries to the operators, the shared checks, and what tests and tools look
// at.
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/utils/pybind.h>

#include <algorithm>
#include <cmath>
#include <string>

#include "api.h"
#include "api_params.h"
#include "build_info.h"
#include "head_parts.h"
#include "path_choice.h"

namespace py = pybind11;

namespace flash_ext {
namespace {

// ---- entries ------------------------------------------------------------------------------------

using OptionalInt = std::optional<int64_t>;

double resolved_scale(std::optional<double> softmax_scale, const Tensor& q) {
  if (softmax_scale.has_value()) return *softmax_scale;
  const int64_t head_dim = q.dim() == 0 ? 0 : q.sym_size(-1).guard_int(__FILE__, __LINE__);
  return 1.0 / std::sqrt(static_cast<double>(head_dim));
}

// Causal narrows the window to the right; a value that is out of range stays and is refused by the
// checks.
int64_t resolved_window_right(bool causal, int64_t window_right) {
  return causal && window_right >= -1 ? 0 : window_right;
}

// Same result as torch.ops.flash_ext.fwd at less than half the cost: it enters the same dispatcher,
// but without boxing the arguments.
FwdResult fwd(const Tensor& q, const Tensor& k, const Tensor& v, const OptionalTensor& cu_seqlens_q,
              const OptionalTensor& cu_seqlens_k, OptionalInt max_seqlen_q,
              OptionalInt max_seqlen_k, std::optional<double> softmax_scale, bool causal,
              int64_t window_left, int64_t window_right, bool deterministic,
              const std::optional<std::string>& path) {
  return call_fwd(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q.value_or(0),
                  max_seqlen_k.value_or(0), resolved_scale(softmax_scale, q), window_left,
                  resolved_window_right(causal, window_right), deterministic, path,
                  /*wide=*/false);
}

BwdResult bwd(const Tensor& dout, const Tensor& q, const Tensor& k, const Tensor& v,
              const Tensor& out, const Tensor& lse, const OptionalTensor& dlse,
              const OptionalTensor& cu_seqlens_q, const OptionalTensor& cu_seqlens_k,
              OptionalInt max_seqlen_q, OptionalInt max_seqlen_k,
              std::optional<double> softmax_scale, bool causal, int64_t window_left,
              int64_t window_right, bool deterministic, const std::optional<std::string>& path) {
  return call_bwd(dout, q, k, v, out, lse, dlse, cu_seqlens_q, cu_seqlens_k,
                  max_seqlen_q.value_or(0), max_seqlen_k.value_or(0),
                  resolved_scale(softmax_scale, q), window_left,
                  resolved_window_right(causal, window_right), deterministic, path,
                  /*wide=*/false);
}

// ---- plans, switches, records -------------------------------------------------------------------

py::dict dict_of(const LaunchPlan& plan) {
  py::dict d;
  d["path"] = plan.path;
  d["kernel"] = plan.kernel;
  d["block_m"] = plan.block_m;
  d["block_n"] = plan.block_n;
  d["stages"] = plan.stages;
  d["threads"] = plan.threads;
  d["smem_bytes"] = plan.smem_bytes;
  d["grid"] = plan.grid;
  d["splits"] = plan.splits;
  return d;
}

Direction direction_of(const std::string& name) {
  if (name != "fwd" && name != "bwd")
    throw py::value_error("direction must be 'fwd' or 'bwd', got " + name);
  return name == "fwd" ? Direction::kForward : Direction::kBackward;
}

// What would be launched for a problem given by numbers alone; no tensor and, with every fact of
// the device given through switches, no GPU either.
py::dict plan(const std::string& direction_name, const std::string& dtype, int32_t batch,
              int64_t seqlen_q, int64_t seqlen_k, int32_t num_heads, int32_t num_heads_k,
              int32_t head_dim, int32_t head_dim_v, bool packed, int32_t window_left,
              int32_t window_right, bool deterministic, std::optional<std::string> path_name,
              int device) {
  const Direction direction = direction_of(direction_name);
  if (dtype != "float16" && dtype != "bfloat16") {
    throw py::value_error("dtype must be 'float16' or 'bfloat16', got " + dtype);
  }
  if (num_heads == 0 && num_heads_k == 0) {  // nothing runs, as without batch entries
    batch = 0;
    num_heads = num_heads_k = 1;
  }
  const int32_t least = std::min({num_heads, num_heads_k, head_dim, head_dim_v});
  if (least < 1 || std::min<int64_t>({batch, seqlen_q, seqlen_k}) < 0 || num_heads % num_heads_k != 0) {
    throw py::value_error("head sizes must be at least 1, batch, heads and lengths at least 0, and num_heads a multiple "
                          "of num_heads_k");
  }
  static const int32_t no_cu_seqlens = 0;  // never read: plans look at metadata only
  Problem p;
  p.dtype = dtype == "float16" ? DType::kFloat16 : DType::kBFloat16;
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
  set_window(p, window_left, window_right);
  const DeviceInfo info = device_info(device);
  if (!info.error.empty()) throw std::runtime_error(info.error);
  deterministic = deterministic || info.batch_invariant;

  py::dict result;
  if (const Path* path = choose_path(direction, p, info, path_name)) {
    if (direction == Direction::kForward) {
      result = dict_of(path->plan_fwd(p, info));
      result["workspace_bytes"] = path->fwd_workspace(p, info);
    } else {
      const int parts = head_parts_of(*path, p, deterministic, info);
      const Problem run = parts > 1 ? in_parts(p, parts) : p;
      const BwdWorkspace workspace = path->bwd_workspace(run, deterministic, info);
      result = dict_of(path->plan_bwd(run, deterministic, info));
      result["head_parts"] = parts;
      result["workspace_bytes"] =
          4 * (workspace.row_stats_elements + workspace.dq_accum_elements) +
          head_parts_bytes(p, parts);
    }
  } else {
    result["path"] = py::none();
  }
  py::dict reasons;
  for (const Path& path : gpu_paths()) reasons[path.name] = path.why_not(direction, p, info);
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
  d["head_parts"] = record->head_parts;
  return d;
}

py::dict device_facts(int device) {
  const DeviceInfo info = device_info(device);
  if (!info.error.empty()) throw std::runtime_error(info.error);
  py::dict d;
  d["compute_capability"] = py::make_tuple(info.cc_major, info.cc_minor);
  d["num_sms"] = info.num_sms;
  d["smem_per_block"] = info.smem_per_block;
  d["l2_bytes"] = info.l2_bytes;
  return d;
}

py::dict build_facts() {
  const BuildInfo& info = build_info();
  py::dict d;
  d["version"] = info.version;
  d["git_sha"] = info.git_sha;
  d["torch"] = info.torch;
  d["cuda"] = info.cuda;
  d["archs"] = info.archs;
  d["flags"] = info.flags;
  d["variant"] = info.variant;
  return d;
}

}  // namespace
}  // namespace flash_ext

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  using namespace flash_ext;
  using torch::wrap_pybind_function;
  using torch::wrap_pybind_function_no_gil;

  m.doc() =
      "Kernels and operators of flash_ext; use the functions of the package instead of these.";
  m.attr("build_info") = build_facts();

  m.def("fwd", wrap_pybind_function_no_gil(fwd), py::arg("q"), py::arg("k"), py::arg("v"),
        py::arg("cu_seqlens_q"), py::arg("cu_seqlens_k"), py::arg("max_seqlen_q"),
        py::arg("max_seqlen_k"), py::arg("softmax_scale"), py::arg("causal"),
        py::arg("window_left"), py::arg("window_right"), py::arg("deterministic"), py::arg("path"));
  m.def("bwd", wrap_pybind_function_no_gil(bwd), py::arg("dout"), py::arg("q"), py::arg("k"),
        py::arg("v"), py::arg("out"), py::arg("lse"), py::arg("dlse"), py::arg("cu_seqlens_q"),
        py::arg("cu_seqlens_k"), py::arg("max_seqlen_q"), py::arg("max_seqlen_k"),
        py::arg("softmax_scale"), py::arg("causal"), py::arg("window_left"),
        py::arg("window_right"), py::arg("deterministic"), py::arg("path"));
  m.def("check_fwd", wrap_pybind_function(check_fwd));
  m.def("check_bwd", wrap_pybind_function(check_bwd));

  m.def("path_names", &path_names);
  m.def("plan", &plan, py::arg("direction"), py::kw_only(), py::arg("dtype") = "bfloat16",
        py::arg("batch") = 1, py::arg("seqlen_q"), py::arg("seqlen_k"), py::arg("num_heads"),
        py::arg("num_heads_k"), py::arg("head_dim"), py::arg("head_dim_v"),
        py::arg("packed") = false, py::arg("window_left") = -1, py::arg("window_right") = -1,
        py::arg("deterministic") = false, py::arg("path") = py::none(), py::arg("device") = 0);
  m.def("device_facts", &device_facts, py::arg("device") = 0);

  m.def("get_switch", [](const std::string& name) { return get_switch(required_switch(name)); });
  m.def("set_switch", [](const std::string& name, std::optional<int64_t> value) {
    set_switch(required_switch(name), value);
  });
  m.def("last_launch", &latest_launch, py::arg("of_this_thread") = false);
  m.def("use_null_kernels_on_cpu", wrap_pybind_function(use_null_kernels_on_cpu));
}
