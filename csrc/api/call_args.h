// The arguments of the operators, said once: CallArgs has them by name, and lists of its fields make schemas, signatures
// and calls. Their meaning: flash_ext/_attention.py, flash_ext/_ops/modifiers.py.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <c10/core/SymInt.h>

#include <optional>
#include <string>
#include <string_view>
#include <tuple>
#include <type_traits>
#include <utility>

namespace flash_ext {

using at::Tensor;
using c10::SymInt;
using OptionalTensor = std::optional<Tensor>;
using OptionalName = std::optional<std::string_view>;

// What a call says beside q, k, v and what a backward reads. Without modifiers by default.
struct CallArgs {
  OptionalTensor dlse;  // of a backward: the gradient of lse
  OptionalTensor cu_seqlens_q, cu_seqlens_k;  // (batch + 1,) int32; none: dense
  OptionalTensor seqused_k, block_table;  // of a forward over a cache: (batch,), (batch, max_pages) int32
  OptionalTensor k_descale, v_descale;  // of the same in 8 bits: fp32, of heads or of slots and heads
  OptionalTensor tree;  // of the same: a word for each row of q, (total_q,) or (batch, seqlen_q) int64
  SymInt max_seqlen_q = 0, max_seqlen_k = 0;  // 0: not known; for FLOP counts alone
  double scale = 1.;
  SymInt window_size_left = -1, window_size_right = -1;  // inclusive reach, -1: unlimited

  OptionalTensor bias, mask, document_q, document_k, prefix_lens, hidden_rows, hidden_keys, blocks, slopes, sinks, rng;
  double softcap = 0., dropout_p = 0.;
  SymInt block_rows = 0, block_cols = 0, sink_tokens = 0, chunk = 0;
  bool top_left = false;

  bool want_row_max = false;  // of a forward with modifiers
  bool need_qkv = true, need_bias = false, need_slopes = false, need_sinks = false;  // of a backward with modifiers
  bool deterministic = false;
  OptionalName backend;
  bool wide = false;  // results as they were accumulated: fp32, where q is not wider already
  bool want_lse = true;  // of a forward; where a gradient needs it, it is made in any case
};

template <typename T>
struct Field {
  std::string_view name;
  T CallArgs::* member;
};
#define FLASH_EXT_FIELD(name) \
  ::flash_ext::Field { #name, &::flash_ext::CallArgs::name }

namespace fields {
inline constexpr std::tuple kDlse{FLASH_EXT_FIELD(dlse)};
inline constexpr std::tuple kProblem{
    FLASH_EXT_FIELD(cu_seqlens_q),     FLASH_EXT_FIELD(cu_seqlens_k), FLASH_EXT_FIELD(max_seqlen_q),
    FLASH_EXT_FIELD(max_seqlen_k),     FLASH_EXT_FIELD(scale),        FLASH_EXT_FIELD(window_size_left),
    FLASH_EXT_FIELD(window_size_right)};
inline constexpr std::tuple kCachedOptions{FLASH_EXT_FIELD(cu_seqlens_q),
                                           FLASH_EXT_FIELD(cu_seqlens_k),
                                           FLASH_EXT_FIELD(seqused_k),
                                           FLASH_EXT_FIELD(block_table),
                                           FLASH_EXT_FIELD(max_seqlen_q),
                                           FLASH_EXT_FIELD(max_seqlen_k),
                                           FLASH_EXT_FIELD(scale),
                                           FLASH_EXT_FIELD(window_size_left),
                                           FLASH_EXT_FIELD(window_size_right),
                                           FLASH_EXT_FIELD(slopes),
                                           FLASH_EXT_FIELD(sinks),
                                           FLASH_EXT_FIELD(softcap),
                                           FLASH_EXT_FIELD(backend)};
// In the order of flash_ext._ops.modifiers.Modifiers.
inline constexpr std::tuple kModifiers{
    FLASH_EXT_FIELD(bias),        FLASH_EXT_FIELD(mask),        FLASH_EXT_FIELD(document_q),
    FLASH_EXT_FIELD(document_k),  FLASH_EXT_FIELD(prefix_lens), FLASH_EXT_FIELD(hidden_rows),
    FLASH_EXT_FIELD(hidden_keys), FLASH_EXT_FIELD(blocks),      FLASH_EXT_FIELD(slopes),
    FLASH_EXT_FIELD(sinks),       FLASH_EXT_FIELD(rng),         FLASH_EXT_FIELD(softcap),
    FLASH_EXT_FIELD(dropout_p),   FLASH_EXT_FIELD(block_rows),  FLASH_EXT_FIELD(block_cols),
    FLASH_EXT_FIELD(sink_tokens), FLASH_EXT_FIELD(chunk),       FLASH_EXT_FIELD(top_left)};
inline constexpr std::tuple kRowMax{FLASH_EXT_FIELD(want_row_max)};
inline constexpr std::tuple kNeeds{FLASH_EXT_FIELD(need_qkv), FLASH_EXT_FIELD(need_bias), FLASH_EXT_FIELD(need_slopes),
                                   FLASH_EXT_FIELD(need_sinks)};
inline constexpr std::tuple kEnd{FLASH_EXT_FIELD(deterministic), FLASH_EXT_FIELD(backend)};
inline constexpr std::tuple kWide{FLASH_EXT_FIELD(wide)};
inline constexpr std::tuple kWantLse{FLASH_EXT_FIELD(want_lse)};
inline constexpr std::tuple kLater{FLASH_EXT_FIELD(tree), FLASH_EXT_FIELD(k_descale), FLASH_EXT_FIELD(v_descale)};

// What the rules are about: all but `wide` and `want_lse`.
inline constexpr auto kCachedChecked = std::tuple_cat(kCachedOptions, kLater);
inline constexpr auto kFwdChecked = std::tuple_cat(kProblem, kEnd);
inline constexpr auto kBwdChecked = std::tuple_cat(kDlse, kProblem, kEnd);
inline constexpr auto kFwdModChecked = std::tuple_cat(kProblem, kModifiers, kRowMax, kEnd);
inline constexpr auto kBwdModChecked = std::tuple_cat(kDlse, kProblem, kModifiers, kNeeds, kEnd);

// What a prepared call holds (api/prepared.h).
inline constexpr auto kPrepared = std::tuple_cat(kProblem, kModifiers);

inline constexpr auto kFwd = std::tuple_cat(kFwdChecked, kWide, kWantLse);
inline constexpr auto kBwd = std::tuple_cat(kBwdChecked, kWide);
inline constexpr auto kCached = std::tuple_cat(kCachedOptions, kWantLse, kLater);
inline constexpr auto kFwdMod = std::tuple_cat(kFwdModChecked, kWide, kWantLse);
inline constexpr auto kBwdMod = std::tuple_cat(kBwdModChecked, kWide);
}  // namespace fields
#undef FLASH_EXT_FIELD

template <typename T>
constexpr std::string_view schema_type() {
  if constexpr (std::is_same_v<T, OptionalTensor>) {
    return "Tensor?";
  } else if constexpr (std::is_same_v<T, SymInt>) {
    return "SymInt";
  } else if constexpr (std::is_same_v<T, double>) {
    return "float";
  } else if constexpr (std::is_same_v<T, bool>) {
    return "bool";
  } else {
    static_assert(std::is_same_v<T, OptionalName>, "a type without a name in schemas");
    return "str?";
  }
}

// An operator that takes kTensors tensors and then the fields of a list, and returns R.
template <typename R, const auto& kFields, typename Tensors, typename Indices>
struct OperatorOf;

template <typename R, const auto& kFields, size_t... T, size_t... F>
struct OperatorOf<R, kFields, std::index_sequence<T...>, std::index_sequence<F...>> {
  template <size_t>
  using TensorArgument = const Tensor&;
  template <size_t I>
  using ValueOf = std::remove_reference_t<decltype(std::declval<CallArgs&>().*std::get<I>(kFields).member)>;
  template <size_t I>
  using Argument = std::conditional_t<std::is_same_v<ValueOf<I>, OptionalTensor>, const OptionalTensor&, ValueOf<I>>;

  using Signature = R(TensorArgument<T>..., Argument<F>...);

  // What the dispatcher calls, for an implementation R(tensors..., const CallArgs&).
  template <auto kImplementation>
  static R entry(TensorArgument<T>... tensors, Argument<F>... values) {
    CallArgs args;
    ((args.*std::get<F>(kFields).member = std::move(values)), ...);
    return kImplementation(tensors..., args);
  }

  // Through the dispatcher, so that every mode and tensor subclass sees the operator.
  static R call(const char* name, TensorArgument<T>... tensors, const CallArgs& args) {
    static const auto op = c10::Dispatcher::singleton().findSchemaOrThrow(name, "").template typed<Signature>();
    return op.call(tensors..., (args.*std::get<F>(kFields).member)...);
  }

  // `tensors`: "Tensor q, Tensor k, Tensor v", `results`: "(Tensor out, Tensor lse)". Some fields have defaults
  // because they came later: programs that were exported before keep working.
  static std::string schema(std::string_view name, std::string_view tensors, std::string_view results) {
    std::string text = std::string(name) + "(" + std::string(tensors);
    const auto add = [&](std::string_view type, std::string_view field) {
      text += ", " + std::string(type) + " " + std::string(field);
      const bool is_none = field == "tree" || field == "k_descale" || field == "v_descale";
      text += field == "wide" ? "=False" : field == "want_lse" ? "=True" : is_none ? "=None" : "";
    };
    (add(schema_type<ValueOf<F>>(), std::get<F>(kFields).name), ...);
    return text + ") -> " + std::string(results);
  }
};

template <typename R, size_t kTensors, const auto& kFields>
using Operator = OperatorOf<R, kFields, std::make_index_sequence<kTensors>,
                            std::make_index_sequence<std::tuple_size_v<std::remove_cvref_t<decltype(kFields)>>>>;

using FwdResult = std::tuple<Tensor, Tensor>;  // out, lse
using BwdResult = std::tuple<Tensor, Tensor, Tensor>;  // dq, dk, dv
using FwdModResult = std::tuple<Tensor, Tensor, Tensor>;  // out, lse, row_max
using BwdModResult = std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor>;  // dq, dk, dv, dbias, dslopes, dsinks

using FwdOperator = Operator<FwdResult, 3, fields::kFwd>;
using BwdOperator = Operator<BwdResult, 6, fields::kBwd>;
using FwdCachedOperator = Operator<FwdResult, 3, fields::kCached>;
using FwdModOperator = Operator<FwdModResult, 3, fields::kFwdMod>;
using BwdModOperator = Operator<BwdModResult, 6, fields::kBwdMod>;

}  // namespace flash_ext
