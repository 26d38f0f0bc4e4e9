// The cases of bwd_bias.cpp: shapes, masks and layouts that reach every branch of csrc/sm80/bwd_bias*.cuh.
#pragma once

#include <string>
#include <vector>

struct Case {
  std::string name;
  std::vector<int> lq = {150, 150}, lk = {170, 170};  // lengths, one a batch entry
  int heads = 2, heads_k = 1, d = 64, dv = 64;
  bool packed = false;
  int pad_q = 0;  // rows of packed q before and after the sequences
  bool unaligned = false;

  bool has_bias = true, bias_fp32 = false;
  bool by_batch = false, by_head = true, by_row = true, by_col = true;  // dimensions the bias has; else broadcast
  int bias_rows = 0, bias_cols = 0;                                     // 0: the longest sequence
  bool staged = true;       // through shared memory, if 16-bit and with columns
  bool slopes = false, slopes_by_batch = false;
  bool want_slopes = false;  // the gradient of the slopes, not of the bias
  int reach = -1;            // of a table by distance, in place of the bias

  int left = -1, right = -1;  // window
  bool top_left = false, prefix = false, mask = false, blocks = false, documents = false, dropout = false;
  int chunk = 0, sink = 0;
  int hidden_rows = 0, hidden_keys = 0;  // intervals of each key, of each row
  float softcap = 0;

  int splits = 1;
  int ctas = 3;
};

inline std::vector<Case> all_cases() {
  std::vector<Case> list;
  const auto add = [&](const char* name, const auto& change) {
    Case c;
    c.name = name;
    change(c);
    list.push_back(c);
  };
  using C = Case&;
  const std::vector<int> medium = {300, 300}, ragged_q = {70, 0, 200, 33}, ragged_k = {90, 10, 260, 0};

  // Which dimensions the bias has, in the order batch, head, row (seq), column (seq); 1: broadcast.
  add("1hss", [](C) {});
  add("1hss causal d128", [&](C c) { c.d = c.dv = 128, c.right = 0, c.lq = c.lk = medium; });
  add("1hss odd columns", [](C c) { c.lk = {171, 171}, c.staged = false; });
  add("1hss columns % 8", [](C c) { c.lk = {168, 168}; });
  add("bhss fp32", [](C c) { c.by_batch = c.bias_fp32 = true; });
  add("11ss gqa d40/72", [](C c) { c.by_head = false, c.heads = 4, c.heads_k = 2, c.d = 40, c.dv = 72; });
  add("bh1s splits", [&](C c) { c.by_batch = true, c.by_row = false, c.splits = 2, c.lq = medium; });
  add("1h1s splits", [&](C c) { c.by_row = false, c.splits = 3, c.lq = medium; });
  add("b1s1", [](C c) { c.by_batch = true, c.by_head = c.by_col = false; });
  add("1hs1 window", [](C c) { c.by_col = false, c.left = 20, c.right = 10; });
  add("1h11", [](C c) { c.by_row = c.by_col = false, c.splits = 2; });
  add("short bias, packed",
      [](C c) { c.bias_rows = 40, c.bias_cols = 96, c.packed = true, c.lq = {70, 0, 200}, c.lk = {90, 10, 260}; });

  const auto slopes_only = [](C c) { c.has_bias = false, c.slopes = c.want_slopes = true; };
  add("slopes", [&](C c) { slopes_only(c), c.splits = 2; });
  add("slopes by batch causal d192", [&](C c) {
    slopes_only(c), c.slopes_by_batch = true, c.right = 0, c.d = 192, c.dv = 128, c.lq = {260, 260}, c.lk = medium;
  });
  add("slopes and bias, of bias", [](C c) { c.slopes = true; });
  add("slopes and bias, of slopes", [](C c) { c.slopes = c.want_slopes = true; });

  const auto table = [](C c, int reach) { c.has_bias = false, c.reach = reach; };
  add("table of one entry", [&](C c) { table(c, 0), c.splits = 2; });
  add("table causal d128", [&](C c) { table(c, 5), c.d = c.dv = 128, c.right = 0, c.lq = c.lk = medium; });
  add("table of two tiles", [&](C c) { table(c, 128), c.lq = {260, 260}, c.lk = {520, 520}, c.splits = 3; });
  add("table beyond all, mask", [&](C c) { table(c, 1000), c.mask = true, c.lq = medium; });
  add("table and slopes, top left", [&](C c) { table(c, 40), c.slopes = c.top_left = true, c.lq = medium; });
  add("table softcap dropout", [&](C c) { table(c, 7), c.softcap = 1.5f, c.dropout = true; });

  add("unaligned", [](C c) { c.unaligned = true; });
  add("mask", [&](C c) { c.mask = true, c.lq = {260, 260}, c.lk = medium; });
  add("mask causal fp32", [](C c) { c.mask = c.bias_fp32 = true, c.right = 0; });
  add("mask slopes", [&](C c) { slopes_only(c), c.mask = true, c.lq = {260, 260}, c.lk = medium; });
  add("blocks", [&](C c) { c.blocks = true, c.lq = c.lk = medium; });
  add("blocks mask 1hs1", [](C c) { c.blocks = c.mask = true, c.by_col = false; });
  add("documents", [&](C c) { c.documents = true, c.lq = c.lk = medium; });
  add("hidden rows", [&](C c) { c.hidden_rows = 2, c.lq = c.lk = medium; });
  add("hidden keys", [&](C c) { c.hidden_keys = 1, c.lq = c.lk = medium; });
  add("prefix chunk sink", [](C c) { c.prefix = true, c.right = 0, c.sink = 5, c.left = 40, c.chunk = 64; });
  add("top left", [](C c) { c.top_left = true, c.right = 0, c.lq = {200, 200}, c.lk = {130, 130}; });
  add("softcap", [](C c) { c.softcap = 1.5f; });
  add("softcap far off", [](C c) { c.softcap = 200.f; });
  add("dropout", [](C c) { c.dropout = true; });
  add("dropout slopes", [&](C c) { slopes_only(c), c.dropout = true; });

  add("packed 1hss",
      [](C c) { c.packed = true, c.lq = {70, 0, 200, 33, 1}, c.lk = {90, 10, 260, 0, 129}, c.pad_q = 9; });
  add("packed bhss", [](C c) { c.packed = c.by_batch = true, c.lq = {70, 0, 200}, c.lk = {90, 10, 260}, c.pad_q = 9; });
  const auto ragged = [&](C c) { c.packed = true, c.lq = ragged_q, c.lk = ragged_k, c.pad_q = 9; };
  add("packed 1h1s", [&](C c) { ragged(c), c.by_row = false, c.splits = 3; });
  add("packed bh1s", [&](C c) { ragged(c), c.by_batch = true, c.by_row = false, c.splits = 2; });
  add("packed slopes causal dropout",
      [&](C c) { ragged(c), slopes_only(c), c.splits = 2, c.right = 0, c.dropout = true, c.lk[3] = 50, c.pad_q = 40; });
  add("packed table", [&](C c) { ragged(c), table(c, 30), c.splits = 2; });
  add("packed table, documents", [&](C c) { ragged(c), table(c, 200), c.documents = true, c.lk[3] = 50; });
  add("packed b1s1 documents mask", [&](C c) {
    ragged(c), c.by_batch = true, c.by_head = c.by_col = false, c.documents = c.mask = true, c.lk[3] = 50, c.pad_q = 40;
  });

  add("many batch entries", [](C c) { c.heads = 1, c.lq.assign(40, 20), c.lk.assign(40, 30), c.d = c.dv = 16; });
  add("many heads summed",
      [](C c) { c.heads = c.heads_k = 36, c.by_head = false, c.lq = {20, 20}, c.lk = {30, 30}, c.d = c.dv = 16; });
  add("d256/200", [](C c) { c.d = 256, c.dv = 200, c.lq = {130, 130}; });
  add("d96", [](C c) { c.d = c.dv = 96, c.lq = {130, 130}, c.lk = {256, 256}; });
  add("whole tiles d64", [](C c) { c.lq = c.lk = {256}, c.ctas = 2; });
  add("whole tiles d128",
      [](C c) { c.d = c.dv = 128, c.lq = {256, 256, 256}, c.lk = {128, 128, 128}, c.heads_k = 2, c.ctas = 2; });
  add("window, tiles without steps",
      [](C c) { c.right = 0, c.left = 30, c.lq = {384}, c.lk = {512}, c.heads = 1, c.ctas = 2; });
  add("causal odd, tiles without steps",
      [](C c) { c.right = 0, c.staged = false, c.lq = {260}, c.lk = {333}, c.heads = 1, c.bias_fp32 = true; });
  add("long line d16",
      [](C c) { c.by_col = c.by_head = false, c.heads = 1, c.lq = {40}, c.lk = {2600}, c.d = c.dv = 16; });
  return list;
}

// A few small ones, for every run of the tests: a bias of every element and one summed over rows and split, packed
// sequences with a mask and broadcast columns, slopes with a softcap and dropout, and a table by
// distance.
inline std::vector<Case> few_cases() {
  std::vector<Case> list(5);
  list[0].name = "few: causal", list[0].lq = list[0].lk = {72}, list[0].right = 0;
  list[1].name = "few: summed over rows", list[1].by_row = false, list[1].splits = 2;
  list[1].lq = {80}, list[1].lk = {40};
  list[2].name = "few: packed, masked", list[2].packed = list[2].mask = true, list[2].by_col = false;
  list[2].lq = {30, 0, 17}, list[2].lk = {40, 9, 33}, list[2].pad_q = 9;
  list[3].name = "few: slopes", list[3].has_bias = false, list[3].slopes = list[3].want_slopes = true;
  list[3].softcap = 1.5f, list[3].dropout = true, list[3].lq = {40}, list[3].lk = {70};
  list[4].name = "few: table", list[4].has_bias = false, list[4].reach = 20, list[4].packed = true;
  list[4].lq = {150, 30}, list[4].lk = {90, 200};
  return list;
}
