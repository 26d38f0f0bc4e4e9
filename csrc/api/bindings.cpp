// flash_ext._C: the fast entries to the operators, the shared checks, and what tests and tools look
// at.
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/utils/pybind.h>

#include <cmath>
#include <string>
#include <vector>

#include "../build_info.h"
#include "api.h"
#include "operators.h"
#include "plans.h"
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
                     const OptionalTensor& k_descale, const OptionalTensor& v_descale, const OptionalTensor& mask,
                     const OptionalTensor& document_q, const OptionalTensor& document_k, const OptionalTensor& bias) {
  CallArgs a = args_of(q, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, scale, causal, window_size_left,
                       window_size_right, false, backend);
  a.seqused_k = seqused_k, a.block_table = block_table;
  a.slopes = slopes, a.sinks = sinks, a.softcap = softcap;
  a.want_lse = want_lse, a.tree = tree;
  a.k_descale = k_descale, a.v_descale = v_descale;
  a.mask = mask, a.document_q = document_q, a.document_k = document_k, a.bias = bias;
  return call_fwd_cached(q, k, v, a);
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

// ---- facts --------------------------------------------------------------------------------------

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
  m.def("append_kv", wrap_pybind_function_no_gil(&AppendOperator::entry<call_append_kv>));
  m.def("append_behind", wrap_pybind_function_no_gil(&AppendBehindOperator::entry<call_append_behind>));
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
  using CachedCheck = Operator<void, 3, fields::kCachedChecked>;
  m.def("check_fwd_cached", wrap_pybind_function(&CachedCheck::entry<check_fwd_cached>));
  m.def("check_cached_gradients", wrap_pybind_function(&CachedCheck::entry<check_cached_gradients>));
  m.def("check_fwd_cached_gpu", wrap_pybind_function(&CachedCheck::entry<check_fwd_cached_gpu>));
  m.def("is_latents", wrap_pybind_function(is_latents));
  m.def("is_tma_ready", wrap_pybind_function(is_tma_ready));
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
      .def("set_borders", wrap_pybind_function(&PreparedCall::set_borders))
      .def("expect_borders", &PreparedCall::expect_borders)
      .def("may_pack", wrap_pybind_function(&PreparedCall::may_pack))
      .def("fits", wrap_pybind_function(&PreparedCall::fits))
      .def("fwd", wrap_pybind_function_no_gil(prepared_fwd))
      .def("bwd", wrap_pybind_function_no_gil(prepared_bwd));
  m.def("check_append_kv", wrap_pybind_function(&AppendOperator::entry<check_append_kv>));
  m.def("check_append_behind",
        wrap_pybind_function(&Operator<void, 2, fields::kAppendBehind>::entry<check_append_behind>));
  m.def("check_condense", wrap_pybind_function(&Operator<void, 1, fields::kCondense>::entry<check_condense>));

  bind_plans(m);
  m.def("sdpa_served", &sdpa_served);
  m.def("sdpa_returned", &sdpa_returned);
  m.def("set_sdpa_log", &set_sdpa_log);
  m.def("use_null_kernels_on_cpu", wrap_pybind_function(use_null_kernels_on_cpu));
}
