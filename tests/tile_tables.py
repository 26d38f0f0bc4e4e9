"""The tile tables of docs/kernels.md: a program that prints every tile of csrc, and what puts its lines
between the marks of the document. ``python -m tests.docs.test_docs`` writes them.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import tempfile
from pathlib import Path

import pytest

CSRC = Path(__file__).resolve().parents[1] / "csrc"

# Prints every tile: kind, head_dim, class, then the columns of its table.
TILE_PROGRAM = r"""
#include "heuristics.h"
#include "sm90/bwd_mod/tiles.h"
#include "sm90/bwd_split/tiles_mod.h"
#include "sm90/bwd_split/tiles.h"
#include "sm90/fwd/tiles.h"
#include <cstdio>
#include <utility>
using namespace flash_ext;
int part_of(const BwdTile& b) { return b.part_m < b.block_m ? b.part_m : b.block_m; }
void put_fused(const char* scores, int d, int block_n, const sm90::BwdTile& t, int ds_stages, int bytes) {
  std::printf("bwd_fused|%s|%d|%d|%d|%s|%d|%d|%s|%d\n", scores, d, t.kBlockM, block_n,
              t.groups == 1 ? "one" : t.independent ? "independent" : "cooperative", t.stages, ds_stages,
              t.staged && !t.stores_dq ? "yes" : "no", bytes);
}
void put_modified(int d, const sm90::FwdModTile& t, const char* beside) {
  std::printf("fwd_mod_sm90|%d|%d|%d|%d|%d|%s|%s|%d|%d\n", d, t.plain().block_m(), t.block_n, t.kv_stages,
              t.q_stages, t.staged ? "yes" : "no", beside, t.bias_places, t.smem_bytes(d, d));
}
void put_split(const char* scores, int d, int dv, const sm90::SplitBwdTile& t, int dkdv_bytes, int dq_bytes) {
  std::printf("bwd_split|%s|%d|%d|%d|%d|%d|%d|%d|%d|%d|%d|%d|%d\n", scores, d, dv, t.block_m, t.kKeys,
              t.stages, t.rs_columns, dkdv_bytes, t.kQueries, t.block_n, t.k_stages, t.v_stages, dq_bytes);
}
int main() {
  for (int d : kHeadDims) {
    for (SmemClass c : {SmemClass::kLarge, SmemClass::kSmall}) {
      const char* name = c == SmemClass::kLarge ? "227 KB" : "99 KB";
      const FwdTile f = fwd_tile_sm80(d, c);
      const FwdTile m = fwd_mod_tile_sm80(d, c);
      // What has one column for both.
      if (m.block_m != f.block_m || m.warps != f.warps || m.ctas_per_sm != f.ctas_per_sm) return 1;
      const int fwd_bias =
          bias_stage_bytes(m.warps, 16 * m.m_blocks(), m.part_n(), m.smem_bytes(d), smem_limit(c));
      std::printf("fwd|%d|%s|%d|%d|%d|%d|%d|%d|%d|%d|%d|%d|%d\n", d, name, f.block_m, f.warps,
                  16 * f.m_blocks(), f.ctas_per_sm, f.block_n, f.stages, f.smem_bytes(d), m.block_n, m.stages,
                  fwd_bias, m.smem_bytes(d) + fwd_bias);
      const BwdTile b = bwd_tile_sm80(d, c), x = bwd_mod_tile_sm80(d, c);
      if (x.block_n() != b.block_n() || x.stages != b.stages || x.key_blocks != b.key_blocks) return 1;
      if (!x.paired || x.ctas_per_sm != 1) return 1;  // as the text says
      const int extra = bwd_mod_extra_sm80(d, c);
      std::printf("bwd|%d|%s|%d|%d|%d|%d|%d|%s|%d|%d|%d|%d|%d|%d|%d|%d|%d\n", d, name, b.block_n(), b.stages,
                  16 * b.key_blocks, b.block_m, b.warps(), b.paired ? "pairs" : "single", part_of(b),
                  b.ctas_per_sm, b.smem_bytes(d), x.block_m, x.warps(), part_of(x), x.mask_bytes(),
                  extra - x.mask_bytes(), x.smem_bytes(d) + extra);
    }
    const BwdQTile q = bwd_q_tile_sm80(d), m = bwd_q_mod_tile_sm80(d);
    if (m.warps != q.warps) return 1;
    const int bias = bias_stage_bytes(m.warps, 16, m.block_n, m.smem_bytes(d), kSmemLimitSmall);
    std::printf("bwd_q|%d|%d|%d|%d|%d|%d|%d|%d|%d|%d\n", d, q.block_m(), q.warps, q.block_n, q.stages,
                q.smem_bytes(d), m.block_n, m.stages, bias, m.smem_bytes(d) + bias);
  }
  for (SmemClass c : {SmemClass::kLarge, SmemClass::kSmall}) {
    const BwdBiasTile t = bwd_bias_tile_sm80(c);
    std::printf("bwd_bias|%s|%d|%d|%d|%d|32 x %d|%d|%d|%d\n", c == SmemClass::kLarge ? "227 KB" : "99 KB",
                t.block_m(), t.block_n(),
                t.stages, t.warps(), t.warp_n, t.ctas_per_sm, t.bias_bytes(), t.smem_bytes());
  }
  for (int d : kSplitHeadDims) {
    for (int rows : {16, 64}) {
      const SplitTile t = split_tile(d, rows);
      std::printf("fwd_split|%d|%d|%d|%d|%d|%d|%d\n", d, t.rows, t.block_n(), t.key_warps(), t.keys, t.stages,
                  t.smem_bytes(d));
    }
  }
  const int forwards[10][2] = {{64, 64}, {96, 96}, {128, 128}, {192, 128}, {192, 192}, {256, 256},
                               {64, 64}, {96, 96}, {128, 128}, {64, 64}};
  for (int i = 0; i < 10; ++i) {
    const auto [d, dv] = forwards[i];
    const sm90::FwdTile t = sm90::fwd_tile(d, dv, i < 6 ? 192 : i < 9 ? 128 : 64);
    std::printf("fwd_sm90|%d|%d|%d|%d|%d|%d|%d|%d\n", d, dv, t.block_m(), t.block_n, t.consumers,
                t.kv_stages, t.q_stages, t.smem_bytes(d, dv));
  }
  for (int d : {64, 128, 192, 256}) {
    const sm90::FwdModTile t = sm90::fwd_mod_tile(d);
    put_modified(d, t, t.bias_has_place ? "bias, own places" : "bias, over Q and output");
  }
  for (int d : {64, 128}) {
    for (int wide = sm90::has_wide_m192(d); wide >= 0; --wide) {
      put_modified(d, sm90::m192_mod_tile(d, wide), "nothing");
      put_modified(d, sm90::m192_bias_tile(d, wide), "bias");
    }
    put_modified(d, sm90::m192_loose_bias_tile(d), "loose bias");
    if (sm90::has_m192_float_bias(d)) put_modified(d, sm90::m192_float_bias_tile(d), "bias in fp32");
    put_modified(d, sm90::m192_words_tile(d), "words");
  }
  for (int d : {64, 96, 128}) {
    const sm90::BwdTile t = sm90::bwd_tile(d);
    put_fused("plain", d, t.block_n(), t, t.ds_stages(), t.smem_bytes(d));
  }
  const auto put_stored = [](int d, const sm90::BwdTile& t) {
    put_fused("plain, dQ stored", d, t.block_n(), t, t.ds_stages(), t.smem_bytes(d));
  };
  for (int d : {64, 96}) put_stored(d, sm90::stored_tile(d));
  for (int d : {64, 96, 128}) put_stored(d, sm90::stored_short_tile(d));
  for (int d : {64, 128}) {
    for (bool float_bias : {false, true}) {
      const sm90::BwdModTile t = sm90::bwd_mod_tile(d, float_bias);
      put_fused(float_bias ? "modified, bias in fp32" : "modified", d, t.block_n(), t.plain(), t.ds_stages,
                t.smem_bytes(d));
    }
  }
  for (const auto beside : {sm90::BesideScores::kWords, sm90::BesideScores::kBias}) {
    const sm90::BwdModTile t = sm90::wide_bwd_mod_tile(beside);
    const char* const name = beside == sm90::BesideScores::kBias ? "modified, wide, bias" : "modified, wide";
    put_fused(name, sm90::kWideModHeadDim, t.block_n(), t.plain(), t.ds_stages,
              t.smem_bytes(sm90::kWideModHeadDim));
  }
  for (const auto [d, dv] : {std::pair{192, 128}, {192, 192}, {256, 256}}) {
    const sm90::SplitBwdTile t = sm90::split_bwd_tile(d, dv);
    put_split("plain", d, dv, t, t.dkv_smem_bytes(d, dv), t.dq_smem_bytes(d, dv));
  }
  for (int d : {64, 128, 192, 256}) {
    put_split("modified", d, d, sm90::split_mod_tile(d), sm90::dkdv_mod_bytes(d),
              sm90::dq_mod_bytes(d));
  }
}
"""
TILE_HEADERS = {
    "fwd": "head_dim|class|kBlockM|warps|rows a warp|CTAs an SM|plain: kBlockN|stages|shared memory, bytes|"
    "modified: kBlockN|stages|bias, bytes|shared memory, bytes",
    "fwd_split": "head_dim|rows|keys at a time|rings|keys a tile|stages of a ring|shared memory, bytes",
    "bwd": "head_dim|class|kBlockN|stages|keys a group|plain: kBlockM|warps|key groups|queries a part|"
    "CTAs an SM|shared memory, bytes|modified: kBlockM|warps|queries a part|mask, bytes|bias, bytes|"
    "shared memory, bytes",
    "bwd_q": "head_dim|kBlockM|warps|plain: kBlockN|stages|shared memory, bytes|modified: kBlockN|stages|"
    "bias, bytes|shared memory, bytes",
    "bwd_bias": "class|kBlockM|kBlockN|stages|warps|a warp|CTAs an SM|bias, bytes|shared memory, bytes",
    "fwd_sm90": "head_dim|head_dim_v|kBlockM|kBlockN|consumer warpgroups|K/V stages|Q stages|"
    "shared memory, bytes",
    "fwd_mod_sm90": "head_dim|kBlockM|kBlockN|K/V stages|Q stages|output staged|beside scores|places for it|"
    "shared memory, bytes",
    "bwd_fused": "scores|head_dim|kBlockM|kBlockN|warpgroups|Q and dO stages|dS stages|dQ staged|"
    "shared memory, bytes",
    "bwd_split": "scores|head_dim|head_dim_v|dK, dV: kBlockM|kBlockN|Q and dO stages|columns in registers|"
    "shared memory, bytes|dQ: kBlockM|kBlockN|K stages|V stages|shared memory, bytes",
}
TILE_BLOCK = "<!-- {0}: written by python -m tests.docs.test_docs -->\n{1}<!-- end of {0} -->"


def tile_tables() -> dict[str, str]:
    """{kernel: markdown table}, from the headers of csrc as they are now."""
    compiler = os.environ.get("CXX") or shutil.which("g++") or shutil.which("c++")
    if compiler is None:
        pytest.skip("no C++ compiler")
    with tempfile.TemporaryDirectory() as folder:
        program = Path(folder) / "tiles"
        subprocess.run(
            [*compiler.split(), "-std=c++20", f"-I{CSRC}", "-xc++", "-", "-o", str(program)],
            input=TILE_PROGRAM, text=True, check=True)  # fmt: skip
        lines = subprocess.run([str(program)], capture_output=True, text=True, check=True).stdout.splitlines()
    tables = {}
    for kind, header in TILE_HEADERS.items():
        body = [line.split("|")[1:] for line in lines if line.split("|")[0] == kind]
        table = [header.split("|"), ["---"] * (header.count("|") + 1), *body]
        tables[kind] = "".join("| " + " | ".join(row) + " |\n" for row in table)
    return tables


def with_tile_tables(text: str, tables: dict[str, str]) -> str:
    for kind, table in tables.items():
        pattern = re.escape(TILE_BLOCK).replace(r"\{0\}", kind).replace(r"\{1\}", ".*?")
        text, count = re.subn(pattern, lambda _, k=kind, t=table: TILE_BLOCK.format(k, t), text, flags=re.S)
        assert count == 1, f"docs/kernels.md has {count} tables of {kind}"
    return text
