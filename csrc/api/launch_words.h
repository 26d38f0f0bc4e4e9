// What printed plans call the members of a launch.
#pragma once

#include "../plan.h"

namespace flash_ext {

inline const char* word_of(ScoreVariant v) {
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
    case ScoreVariant::kAdd: return "add";
    case ScoreVariant::kAddFloat: return "add_float";
    case ScoreVariant::kAddDrop: return "add_drop";
    case ScoreVariant::kChange: return "change";
    case ScoreVariant::kAll: return "all";
    case ScoreVariant::kMixed: return "mixed";
  }
  return "?";
}

inline const char* word_of(DqMode m) {
  switch (m) {
    case DqMode::kNone: return "none";
    case DqMode::kAtomic: return "atomic";
    case DqMode::kOrdered: return "ordered";
    case DqMode::kPool: return "pool";
    case DqMode::kStored: return "stored";
    case DqMode::kElsewhere: return "elsewhere";
  }
  return "?";
}

}  // namespace flash_ext
