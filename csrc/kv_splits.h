// Few queries of many keys: how CTAs share out the keys of a head. plan/split_kv.h decides into how many parts. No
// CUDA, no torch.
#pragma once

#include <cstdint>

#include "divisor.h"

namespace flash_ext {

// CTA i has key head i % heads_k, part i / heads_k % splits, and the slot of packed rows that is left: tiles of a
// sequence one after another, sequences likewise.
struct SplitGrid {
  int rows = 0;  // of a CTA; 0: keys are not split
  int splits = 1;
  double gain = 0.;  // expected, against the other forwards; without a limit where it is not asked
  int64_t ctas = 0;
  int64_t total_rows = 0;  // query heads x queries
  int pitch = 0;  // floats of a row of partial outputs
  Divisor heads_k, parts;
  Divisor tiles;  // of a sequence, dense calls only
  Divisor group;  // query heads of a key head
  Divisor heads;
  Divisor queries;  // of a sequence, dense calls only

  // Of the workspace: maximum and sum of each row and part, behind them its output before the division.
  int64_t stats_bytes = 0;
  int64_t workspace_bytes() const { return splits == 1 ? 0 : stats_bytes + 4 * splits * total_rows * pitch; }
};

}  // namespace flash_ext
