// The operators' arguments, said once: lists of the fields of call_args.h make schemas, signatures and calls.
#pragma once

#include <initializer_list>
#include <string>
#include <string_view>
#include <tuple>
#include <type_traits>
#include <utility>

#include "call_args.h"

namespace flash_ext {

// An argument: a member of a struct under the name that schemas have.
template <typename Args, typename T>
struct Field {
  using Owner = Args;
  static constexpr bool kIsTensor = std::is_same_v<T, Tensor> || std::is_same_v<T, OptionalTensor>;
  using Argument = std::conditional_t<kIsTensor, const T&, T>;  // of functions

  std::string_view name;
  T Args::* member;
  std::string_view value = {};  // its default, where it came later: programs that were exported before keep working
  char written = 0;  // the name of its memory in schemas, where the operator writes it

  constexpr Field with_default(std::string_view text) const { return {name, member, text, written}; }
  constexpr Field written_as(char memory) const { return {name, member, value, memory}; }
};
#define FLASH_EXT_FIELD_OF(Args, name) \
  ::flash_ext::Field { #name, &::flash_ext::Args::name }
#define FLASH_EXT_FIELD(name) FLASH_EXT_FIELD_OF(CallArgs, name)

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
inline constexpr std::tuple kWide{FLASH_EXT_FIELD(wide).with_default("False")};
inline constexpr std::tuple kWantLse{FLASH_EXT_FIELD(want_lse).with_default("True")};
inline constexpr std::tuple kLater{
    FLASH_EXT_FIELD(tree).with_default("None"),       FLASH_EXT_FIELD(k_descale).with_default("None"),
    FLASH_EXT_FIELD(v_descale).with_default("None"),  FLASH_EXT_FIELD(mask).with_default("None"),
    FLASH_EXT_FIELD(document_q).with_default("None"), FLASH_EXT_FIELD(document_k).with_default("None"),
    FLASH_EXT_FIELD(bias).with_default("None")};

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

inline constexpr std::tuple kCondense{FLASH_EXT_FIELD(block_rows).with_default("0"),
                                      FLASH_EXT_FIELD(block_cols).with_default("0")};
inline constexpr std::tuple kAppend{FLASH_EXT_FIELD_OF(AppendArgs, k_cache).written_as('a'),
                                    FLASH_EXT_FIELD_OF(AppendArgs, v_cache).written_as('b'),
                                    FLASH_EXT_FIELD_OF(AppendArgs, slot_mapping),
                                    FLASH_EXT_FIELD_OF(AppendArgs, cos),
                                    FLASH_EXT_FIELD_OF(AppendArgs, sin),
                                    FLASH_EXT_FIELD_OF(AppendArgs, positions),
                                    FLASH_EXT_FIELD_OF(AppendArgs, interleaved),
                                    FLASH_EXT_FIELD_OF(AppendArgs, k_descale).with_default("None").written_as('c'),
                                    FLASH_EXT_FIELD_OF(AppendArgs, v_descale).with_default("None").written_as('d')};
inline constexpr std::tuple kAppendBehind{FLASH_EXT_FIELD_OF(AppendBehindArgs, k_cache).written_as('a'),
                                          FLASH_EXT_FIELD_OF(AppendBehindArgs, v_cache).written_as('b'),
                                          FLASH_EXT_FIELD_OF(AppendBehindArgs, lengths),
                                          FLASH_EXT_FIELD_OF(AppendBehindArgs, block_table),
                                          FLASH_EXT_FIELD_OF(AppendBehindArgs, entries),
                                          FLASH_EXT_FIELD_OF(AppendBehindArgs, cos),
                                          FLASH_EXT_FIELD_OF(AppendBehindArgs, sin),
                                          FLASH_EXT_FIELD_OF(AppendBehindArgs, interleaved),
                                          FLASH_EXT_FIELD_OF(AppendBehindArgs, q),
                                          FLASH_EXT_FIELD_OF(AppendBehindArgs, cu_seqlens_q),
                                          FLASH_EXT_FIELD_OF(AppendBehindArgs, counts),
                                          FLASH_EXT_FIELD_OF(AppendBehindArgs, k_descale).written_as('c'),
                                          FLASH_EXT_FIELD_OF(AppendBehindArgs, v_descale).written_as('d')};
inline constexpr std::tuple kQuantize{FLASH_EXT_FIELD_OF(QuantizeArgs, cu_seqlens_q),
                                      FLASH_EXT_FIELD_OF(QuantizeArgs, cu_seqlens_k),
                                      FLASH_EXT_FIELD_OF(QuantizeArgs, seqused_k),
                                      FLASH_EXT_FIELD_OF(QuantizeArgs, by_block),
                                      FLASH_EXT_FIELD_OF(QuantizeArgs, smooth_k),
                                      FLASH_EXT_FIELD_OF(QuantizeArgs, smooth_v),
                                      FLASH_EXT_FIELD_OF(QuantizeArgs, hadamard),
                                      FLASH_EXT_FIELD_OF(QuantizeArgs, mixed),
                                      FLASH_EXT_FIELD_OF(QuantizeArgs, cos_q).with_default("None"),
                                      FLASH_EXT_FIELD_OF(QuantizeArgs, sin_q).with_default("None"),
                                      FLASH_EXT_FIELD_OF(QuantizeArgs, cos_k).with_default("None"),
                                      FLASH_EXT_FIELD_OF(QuantizeArgs, sin_k).with_default("None"),
                                      FLASH_EXT_FIELD_OF(QuantizeArgs, interleaved).with_default("False")};
inline constexpr std::tuple kFwdFp8{FLASH_EXT_FIELD_OF(Fp8CallArgs, q_descale),
                                    FLASH_EXT_FIELD_OF(Fp8CallArgs, k_descale),
                                    FLASH_EXT_FIELD_OF(Fp8CallArgs, v_descale),
                                    FLASH_EXT_FIELD_OF(Fp8CallArgs, v_offset),
                                    FLASH_EXT_FIELD_OF(Fp8CallArgs, row_offset),
                                    FLASH_EXT_FIELD_OF(Fp8CallArgs, cu_seqlens_q),
                                    FLASH_EXT_FIELD_OF(Fp8CallArgs, cu_seqlens_k),
                                    FLASH_EXT_FIELD_OF(Fp8CallArgs, seqused_k),
                                    FLASH_EXT_FIELD_OF(Fp8CallArgs, sinks),
                                    FLASH_EXT_FIELD_OF(Fp8CallArgs, scale),
                                    FLASH_EXT_FIELD_OF(Fp8CallArgs, window_size_left),
                                    FLASH_EXT_FIELD_OF(Fp8CallArgs, window_size_right),
                                    FLASH_EXT_FIELD_OF(Fp8CallArgs, dtype),
                                    FLASH_EXT_FIELD_OF(Fp8CallArgs, backend),
                                    FLASH_EXT_FIELD_OF(Fp8CallArgs, want_lse).with_default("True"),
                                    FLASH_EXT_FIELD_OF(Fp8CallArgs, want_row_max).with_default("False"),
                                    FLASH_EXT_FIELD_OF(Fp8CallArgs, small).with_default("False")};
}  // namespace fields
#undef FLASH_EXT_FIELD
#undef FLASH_EXT_FIELD_OF

// f(member) for each field of a list that is an optional tensor.
template <const auto& kFields, typename F>
void for_each_tensor(const F& f) {
  const auto visit = [&]<typename Args, typename T>(const Field<Args, T>& field) {
    if constexpr (std::is_same_v<T, OptionalTensor>) f(field.member);
  };
  std::apply([&](const auto&... field) { (visit(field), ...); }, kFields);
}

// f(field) for each of the others.
template <const auto& kFields, typename F>
void for_each_number(const F& f) {
  const auto visit = [&]<typename Args, typename T>(const Field<Args, T>& field) {
    if constexpr (!std::is_same_v<T, OptionalTensor>) f(field);
  };
  std::apply([&](const auto&... field) { (visit(field), ...); }, kFields);
}

template <typename T>
constexpr std::string_view schema_type() {
  if constexpr (std::is_same_v<T, Tensor> || std::is_same_v<T, OptionalTensor>) {
    return "Tensor";
  } else if constexpr (std::is_same_v<T, SymInt>) {
    return "SymInt";
  } else if constexpr (std::is_same_v<T, int64_t>) {
    return "int";
  } else if constexpr (std::is_same_v<T, double>) {
    return "float";
  } else if constexpr (std::is_same_v<T, bool>) {
    return "bool";
  } else if constexpr (std::is_same_v<T, at::ScalarType>) {
    return "ScalarType";
  } else {
    static_assert(std::is_same_v<T, OptionalName>, "a type without a name in schemas");
    return "str";
  }
}

// "Tensor(a!)? k_descale=None"
template <typename Args, typename T>
std::string schema_of(const Field<Args, T>& field) {
  constexpr bool kOptional = std::is_same_v<T, OptionalTensor> || std::is_same_v<T, OptionalName>;
  std::string text(schema_type<T>());
  if (field.written != 0) text += std::string("(") + field.written + "!)";
  text += (kOptional ? "? " : " ") + std::string(field.name);
  return field.value.empty() ? text : text + "=" + std::string(field.value);
}

using Names = std::initializer_list<const char*>;

// "Tensor q, Tensor k"
inline std::string schema_of_tensors(Names names) {
  std::string text;
  for (const char* name : names) text += std::string(text.empty() ? "" : ", ") + "Tensor " + name;
  return text;
}

// An operator that takes kTensors tensors and then the fields of a list, and returns R.
template <typename R, const auto& kFields, typename Tensors, typename Indices>
struct OperatorOf;

template <typename R, const auto& kFields, size_t... T, size_t... F>
struct OperatorOf<R, kFields, std::index_sequence<T...>, std::index_sequence<F...>> {
  template <size_t I>
  using FieldAt = std::remove_cvref_t<decltype(std::get<I>(kFields))>;
  template <size_t>
  using TensorArgument = const Tensor&;
  template <size_t I>
  using Argument = typename FieldAt<I>::Argument;
  using Args = typename FieldAt<0>::Owner;

  using Signature = R(TensorArgument<T>..., Argument<F>...);

  // What the dispatcher calls, for an implementation R(tensors..., const Args&).
  template <auto kImplementation>
  static R entry(TensorArgument<T>... tensors, Argument<F>... values) {
    Args args;
    ((args.*std::get<F>(kFields).member = std::move(values)), ...);
    return kImplementation(tensors..., args);
  }

  // `op`: the operator as the dispatcher holds it.
  template <typename Handle>
  static R call(const Handle& op, TensorArgument<T>... tensors, const Args& args) {
    return op.call(tensors..., (args.*std::get<F>(kFields).member)...);
  }

  // `tensors`: the names of those in front of the fields.
  static std::string schema(const char* name, Names tensors, Names results) {
    std::string text = std::string(name) + "(" + schema_of_tensors(tensors);
    ((text += ", " + schema_of(std::get<F>(kFields))), ...);
    return text + ") -> (" + schema_of_tensors(results) + ")";
  }
};

template <typename R, size_t kTensors, const auto& kFields>
using Operator = OperatorOf<R, kFields, std::make_index_sequence<kTensors>,
                            std::make_index_sequence<std::tuple_size_v<std::remove_cvref_t<decltype(kFields)>>>>;

using FwdOperator = Operator<FwdResult, 3, fields::kFwd>;
using BwdOperator = Operator<BwdResult, 6, fields::kBwd>;
using FwdCachedOperator = Operator<FwdResult, 3, fields::kCached>;
using FwdModOperator = Operator<FwdModResult, 3, fields::kFwdMod>;
using BwdModOperator = Operator<BwdModResult, 6, fields::kBwdMod>;
using QuantizeOperator = Operator<Quantized, 3, fields::kQuantize>;
using FwdFp8Operator = Operator<FwdModResult, 3, fields::kFwdFp8>;
using CondenseOperator = Operator<Tensor, 1, fields::kCondense>;
using AppendOperator = Operator<void, 2, fields::kAppend>;
using AppendBehindOperator = Operator<AppendBehindResult, 2, fields::kAppendBehind>;

}  // namespace flash_ext
