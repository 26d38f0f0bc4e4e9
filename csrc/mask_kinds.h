// What hides keys, or shows them, in one table. What a kernel cannot do, and which tests a tile needs, follow from it.
// A new kind gets a member of MaskKind; until it has a row in traits_of() and one in is_asked(), nothing compiles.
// For host and kernels. No CUDA, no torch.
#pragma once

#include <cstdint>
#include <utility>

#include "host_device.h"
#include "modifiers.h"

namespace flash_ext {

enum class MaskKind : int {
  kChunk,
  kSinkTokens,
  kPrefix,
  kMask,
  kBlocks,
  kHiddenKeys,
  kDocuments,
  kHiddenRows,
  kCount
};

struct MaskTraits {
  enum KnownBy { kInterval, kRowWord, kKeyWord };              // kTestInterval, kTestRows, kTestKeys
  enum Reads { kNothing, kPerSequence, kBlockMap, kSummaries };
  KnownBy known_by;     // the test that a tile asks for because of it
  Reads reads;          // what is read to find out whether a tile matters and needs that test
  bool hides;           // takes keys away; the others give back some that a window or causal took
  bool unequal;         // equal tiles of queries differ in work
  bool word_is_stored;  // the row word lies in memory as it is: the bit mask
  bool over_caches;     // calls over a cache may ask for it
};

// Without a default: for a kind that is missing here this is no constant.
constexpr MaskTraits traits_of(MaskKind kind) {
  using T = MaskTraits;
  switch (kind) {
    case MaskKind::kChunk: return {T::kInterval, T::kNothing, true, true, false, false};
    case MaskKind::kSinkTokens: return {T::kInterval, T::kNothing, false, false, false, false};
    case MaskKind::kPrefix: return {T::kInterval, T::kPerSequence, false, true, false, false};
    case MaskKind::kMask: return {T::kRowWord, T::kSummaries, true, true, true, true};
    case MaskKind::kBlocks: return {T::kRowWord, T::kBlockMap, true, true, false, false};
    case MaskKind::kHiddenKeys: return {T::kRowWord, T::kSummaries, true, true, false, false};
    case MaskKind::kDocuments: return {T::kKeyWord, T::kSummaries, true, true, false, true};
    case MaskKind::kHiddenRows: return {T::kKeyWord, T::kSummaries, true, true, false, false};
    case MaskKind::kCount: break;
  }
  throw "a mask kind without traits";
}

template <MaskKind kKind>
inline constexpr bool kIsUnknown = true;

template <MaskKind kKind>
FLASH_EXT_HOST_DEVICE constexpr bool is_asked(const Modifiers& m) {
  if constexpr (kKind == MaskKind::kChunk) return m.chunk > 0;
  else if constexpr (kKind == MaskKind::kSinkTokens) return m.sink_tokens > 0;
  else if constexpr (kKind == MaskKind::kPrefix) return m.prefix_lens != nullptr;
  else if constexpr (kKind == MaskKind::kMask) return m.mask.words != nullptr;
  else if constexpr (kKind == MaskKind::kBlocks) return m.blocks.words != nullptr;
  else if constexpr (kKind == MaskKind::kHiddenKeys) return m.hidden_keys.count > 0;
  else if constexpr (kKind == MaskKind::kDocuments) return m.document_k.ids != nullptr;
  else if constexpr (kKind == MaskKind::kHiddenRows) return m.hidden_rows.count > 0;
  else static_assert(!kIsUnknown<kKind>, "a mask kind that nobody can ask for");
}

// Sets of kinds. They are constants, and asking for them is nothing but the tests of their members.
using MaskSet = uint32_t;
inline constexpr int kMaskKinds = static_cast<int>(MaskKind::kCount);
inline constexpr MaskSet kAllKinds = (MaskSet{1} << kMaskKinds) - 1;

template <typename Fits>
constexpr MaskSet kinds_where(const Fits& fits) {
  MaskSet set = 0;
  for (int i = 0; i < kMaskKinds; ++i) {
    if (fits(traits_of(static_cast<MaskKind>(i)))) set |= MaskSet{1} << i;
  }
  return set;
}

template <MaskSet kSet, int kIndex>
FLASH_EXT_HOST_DEVICE constexpr bool is_asked_of_set(const Modifiers& m) {
  if constexpr ((kSet >> kIndex & 1) != 0) return is_asked<static_cast<MaskKind>(kIndex)>(m);
  else return false;
}
template <MaskSet kSet, int... kIndices>
FLASH_EXT_HOST_DEVICE constexpr bool asks_any_of(const Modifiers& m, std::integer_sequence<int, kIndices...>) {
  return (is_asked_of_set<kSet, kIndices>(m) || ...);
}

// Does a call ask for any kind of a set, or for none outside it?
template <MaskSet kSet>
FLASH_EXT_HOST_DEVICE constexpr bool asks_any(const Modifiers& m) {
  return asks_any_of<kSet>(m, std::make_integer_sequence<int, kMaskKinds>());
}
template <MaskSet kSet>
FLASH_EXT_HOST_DEVICE constexpr bool asks_only(const Modifiers& m) {
  return !asks_any<kAllKinds & ~kSet>(m);
}

// Every kind has both of its rows, and a call that asks for nothing asks for none.
static_assert(kinds_where([](const MaskTraits&) { return true; }) == kAllKinds && !asks_any<kAllKinds>(Modifiers{}));

// ---- what kernels rely on: the sets that they name ----

inline constexpr MaskSet kKnownByRows =
    kinds_where([](const MaskTraits& t) { return t.known_by == MaskTraits::kRowWord; });
inline constexpr MaskSet kKnownByKeys =
    kinds_where([](const MaskTraits& t) { return t.known_by == MaskTraits::kKeyWord; });

// Row words that have to be made: all but that of the bit mask, which is copied.
inline constexpr MaskSet kMadeRowWords =
    kinds_where([](const MaskTraits& t) { return t.known_by == MaskTraits::kRowWord && !t.word_is_stored; });

// Intervals that are the same for all sequences.
inline constexpr MaskSet kSharedIntervals = kinds_where(
    [](const MaskTraits& t) { return t.known_by == MaskTraits::kInterval && t.reads == MaskTraits::kNothing; });

// Calls over a cache refuse the others.
inline constexpr MaskSet kOverCaches = kinds_where([](const MaskTraits& t) { return t.over_caches; });

// Tiles differ in work, so CTAs fetch them one by one.
inline constexpr MaskSet kUnequalTiles = kinds_where([](const MaskTraits& t) { return t.unequal; });

// Some queries may see no key at all.
inline constexpr MaskSet kHidingKinds = kinds_where([](const MaskTraits& t) { return t.hides; });

}  // namespace flash_ext
