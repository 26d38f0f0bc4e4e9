"""The planted bugs of the kill matrix: what each changes in the sources. mutants.py builds and runs them.

Of the catalogue's 24 two are not here: M17, a dropout offset that does not advance, is in what PyTorch's
generator does, and M22, a launch cache that does not look at the call, would be in csrc/api/. M15 is planted
in the waiting for turns: words that nobody sets would be waited for without an end. What is planted in
``common/`` is in the kernels of both paths where everything is built, else in some of the portable ones; what
is in those of Hopper says so.
"""

from __future__ import annotations

from dataclasses import dataclass

from tests.sources import CSRC, replace_once


@dataclass(frozen=True)
class Edit:
    """One change of csrc/<file>: the text ``find``, which occurs exactly once, becomes ``replace``.

    White space does not count (tests/sources.py).
    """

    file: str
    find: str
    replace: str


@dataclass(frozen=True)
class Mutant:
    """One planted bug.

    name: in the catalogue. first: the file of tests most likely to notice it. objects: the files below csrc/
    whose kernels these tests run on Hopper, enough to compile with the bug; (): all files.
    """

    number: int
    name: str
    bug: str
    edits: tuple[Edit, ...]
    first: str = "masks"
    needs_gpus: int = 1
    objects: tuple[str, ...] = ()

    def patched(self) -> dict[str, str]:
        """The changed files of csrc/ and their new text.

        Raises:
            ValueError: the sources have moved on; the edit has to follow them.
        """
        texts: dict[str, str] = {}
        for edit in self.edits:
            text = texts.get(edit.file) or (CSRC / edit.file).read_text(encoding="utf-8")
            where = f"mutant {self.number}: csrc/{edit.file}"
            texts[edit.file] = replace_once(text, edit.find, edit.replace, where)
        return texts


CONTROL = Mutant(0, "no bug", "the kernels as they are", ())

# Objects of mutants. Most tests keep the kernels for short sequences out, and take the large tiles of
# portable kernels before the small ones.
FWD80, BWD80 = ("inst/fwd_sm80_large.cu",), ("inst/bwd_sm80_large.cu",)
FWD_MOD80, BWD_MOD80 = ("inst/fwd_mod_sm80_large.cu",), ("inst/bwd_mod_sm80_large.cu",)
DBIAS80 = ("inst/bwd_bias_sm80_large.cu",)
SPLIT_KV, SPLIT_KV_CACHED = ("inst/fwd_split.cu",), ("inst/fwd_split_cached.cu",)
FWD90, BWD90 = ("inst/fwd_sm90.cu",), ("inst/bwd_sm90.cu",)
FWD_CACHED90, PACKED_QUANTIZED90 = ("inst/fwd_cached_sm90.cu",), ("inst/fwd_packed_quantized_sm90.cu",)
FWD_FP8 = ("inst/fwd_fp8_sm90.cu",)

LAST_KEY_SEEN = "const int hi = min(seqlen_k - 1, row + shift() + p.reach_right);"

MUTANTS = (
    Mutant(101, "M1 causal diagonal + 1",
           "a causal row sees one key too many, in the masks of elements and in the ranges of tiles", (
        Edit("common/attn_mod.cuh", "last_row + shift() + p.reach_right);",
             "last_row + shift() + p.reach_right + (p.reach_right == 0));"),
        Edit("common/attn_mod.cuh", "first_col - shift() - p.reach_right);",
             "first_col - shift() - p.reach_right - (p.reach_right == 0));"),
        Edit("common/attn_mod.cuh", LAST_KEY_SEEN,
             "const int hi = min(seqlen_k - 1, row + shift() + p.reach_right + (p.reach_right == 0));")),
           objects=FWD80),
    Mutant(102, "M1 causal diagonal - 1",
           "a causal row misses its own key in tiles that are masked by element", (
        Edit("common/attn_mod.cuh", LAST_KEY_SEEN,
             "const int hi = min(seqlen_k - 1, row + shift() + p.reach_right - (p.reach_right == 0));"),),
           objects=FWD80),
    Mutant(201, "M2 last partial key tile unmasked",
           "zero-filled keys behind the last one take part with score 0", (
        Edit("common/attn_mod.cuh", "last_col < seqlen_k && last_col <=", "last_col <="),), objects=FWD80),
    Mutant(202, "M2 33 keys taken as 32", "of a last tile of 96 keys with 33 that are seen, 32 take part", (
        Edit("sm80/fwd/kernel.cuh", "last_key % kBlockN < T::kShortKeys",
             "last_key % kBlockN <= T::kShortKeys"),), objects=FWD80),
    Mutant(301, "M3 newest key dropped",
           "the last row of a sequence ends one key early in tiles that are masked by element", (
        Edit("common/attn_mod.cuh", LAST_KEY_SEEN, LAST_KEY_SEEN[:-1] + " - (row == seqlen_q - 1);"),),
           objects=FWD80),
    Mutant(401, "M4 window left + 1", "a window that is limited to the left holds one key more there", (
        Edit("common/attn_mod.cuh", "row + shift() - p.reach_left);\n    " + LAST_KEY_SEEN,
             "row + shift() - p.reach_left - (p.window_left >= 0));\n    " + LAST_KEY_SEEN),), objects=FWD80),
    Mutant(501, "M5 -inf minus -inf not guarded",
           "what is subtracted from the scores of a row that has seen nothing is -inf", (
        Edit("common/softmax.cuh", "return row_max[r] == -INFINITY ? 0.f : row_max[r];",
             "return row_max[r];"),), objects=FWD80),
    Mutant(601, "M6 rescale skipped", "the running output keeps its scale when the maximum rises", (
        Edit("sm80/fwd/kernel.cuh", "acc_o[mb][db][i] *= factor[2 * mb + i / 2];",
             "acc_o[mb][db][i] *= 1.f;"),), "values", objects=FWD80),
    Mutant(701, "M7 barrier removed: forward loop",
           "no barrier between the arrival of a tile of K and V and its use", (
        Edit("sm80/fwd/kernel.cuh", "    wait_for_copies();\n    const uint32_t kv_at",
             "    debug_delay();\n    ptx::cp_async_wait<0>();\n    debug_delay();\n"
             "    const uint32_t kv_at"),), "races", objects=FWD80),
    Mutant(702, "M7 barrier removed: backward loop",
           "no barrier between the arrival of a tile of Q and dO and its use", (
        Edit("sm80/bwd/kernel.cuh", "buffers of two iterations ago are free.\n    __syncthreads();\n",
             "buffers of two iterations ago are free.\n"),), "races", objects=BWD80),
    Mutant(703, "M7 barrier removed: P of a pair",
           "the second warp of a pair does not wait for the weights of the first", (
        Edit("sm80/bwd/warps.cuh",
             "    ptx::bar_arrive(ptx::kPairBarrier + key_warp * T::kParts + part, "
             "2 * ptx::kWarpThreads);\n", ""),
        Edit("sm80/bwd/warps.cuh",
             "    ptx::bar_sync(ptx::kPairBarrier + key_warp * T::kParts + part, "
             "2 * ptx::kWarpThreads);\n", "")),
           "races", objects=BWD80),
    Mutant(704, "M7 barrier removed: deterministic dQ loop",
           "no barrier between the arrival of a tile of K and V and its use", (
        Edit("sm80/bwd_dq/kernel.cuh", "    wait_for_copies();\n    const uint32_t kv_at",
             "    debug_delay();\n    ptx::cp_async_wait<0>();\n    debug_delay();\n"
             "    const uint32_t kv_at"),), "races", objects=BWD80),
    Mutant(901, "M9 32-bit offset", "the offset of a row, in elements, is computed in 32 bits", (
        Edit("common/seqlen.cuh",
             "+ b * x.batch_stride + row * x.row_stride + h * x.head_stride;",
             "+ static_cast<int32_t>(b * x.batch_stride + row * x.row_stride "
             "+ h * x.head_stride);"),), "sizes", objects=FWD80),
    Mutant(1001, "M10 dout read with the strides of out",
           "rowsum(dO * O) takes strides and alignment of dO from O", (
        Edit("passes/bwd_passes.cuh", "    sum = dot_8<E>(",
             "    StridedView like_out = p.out;\n    like_out.ptr = p.dout.ptr;\n    sum = dot_8<E>("),
        Edit("passes/bwd_passes.cuh",
             "load_8(row_pointer(p.dout, r.b, r.row, r.h) + chunk * 8, valid, p.dout.aligned)",
             "load_8(row_pointer(like_out, r.b, r.row, r.h) + chunk * 8, valid, p.out.aligned)")),
           "layout", objects=BWD80),
    Mutant(1101, "M11 lse in base 2", "the logarithm of the sum is taken to base 2", (
        Edit("common/softmax.cuh", "+ logf(row_sum[r]);", "+ log2f(row_sum[r]);"),), objects=FWD80),
    Mutant(1401, "M14 tail of V not zero-filled",
           "rows of K and V behind the last one keep what shared memory held before", (
        Edit("common/tiles.cuh", "int kThreads>\n__device__ __forceinline__ void load_tile(",
             "int kThreads, bool kZeroTail = true>\n__device__ __forceinline__ void load_tile("),
        Edit("common/tiles.cuh", "ptx::cp_async_16(tile + Tile::offset(r, chunk), in ?",
             "if (in || kZeroTail) ptx::cp_async_16(tile + Tile::offset(r, chunk), in ?"),
        Edit("common/tiles.cuh", "const int valid = r < rows ? src.cols",
             "if (!kZeroTail && r >= rows) continue;\n      const int valid = r < rows ? src.cols"),
        Edit("sm80/fwd/kernel.cuh", "load_tile<kBlockN, D, T::kThreads>(to + stage",
             "load_tile<kBlockN, D, T::kThreads, false>(to + stage")), "values", objects=FWD80),
    Mutant(1601, "M16 deterministic flag ignored",
           "dQ is summed by atomic additions in the deterministic mode, too", (
        Edit("plan/bwd.cpp",
             "const BwdTile t = bwd_tile_sm80(size, class_of(d));\n"
             "  const DqMode dq = r.deterministic ? DqMode::kElsewhere : DqMode::kAtomic;",
             "const BwdTile t = bwd_tile_sm80(size, class_of(d));\n  const DqMode dq = DqMode::kAtomic;"),
        Edit("plan/bwd.cpp", "  add_portable_stats(x, p);\n  if (r.deterministic) {",
             "  add_portable_stats(x, p);\n  if (false) {")), "races", objects=("plan/bwd.cpp",)),
    Mutant(1801, "M18 grouped heads by modulo",
           "query head h reads key head h % num_heads_k in the forward", (
        Edit("sm80/fwd/kernel.cuh", "static_cast<int>(divide(mine.h, grid.shared));",
             "mine.h % p.problem.num_heads_k;"),), "layout", objects=FWD80),
    Mutant(
        2301,
        "M23 device guard removed",
        "kernels are launched on the current device, not on that of the tensors",
        tuple(
            Edit(
                "api/ops.cpp",
                f'range("{name}");\n  const OnDevice on_device(q);\n',
                f'range("{name}");\n',
            )
            for name in ("fwd", "bwd")
        ),
        "system",
        needs_gpus=2,
        objects=("api/ops.cpp",),
    ),
    Mutant(2501, "gradient of lse dropped", "dlse is not subtracted from rowsum(dO * O)", (
        Edit("passes/bwd_passes.cuh", "sum - (p.dlse == nullptr ? 0.f : p.dlse[r.stat])",
             "sum"),), "autograd", objects=BWD80),
    Mutant(2601, "cu_seqlens not clamped", "the bounds of a sequence are taken as they are", (
        Edit("common/seqlen.cuh", "return min(max(cu_seqlens[b], start), end);",
             "return cu_seqlens[b];"),), "varlen", objects=FWD80),
    Mutant(1701, "dropout counter of the tile",
           "forward and dQ draw by the key's place in its tile, not in its sequence", (
        Edit("common/dropout.cuh", "draws(keys, row_id, col0 / 32 + n4, c, lane)",
             "draws(keys, row_id, n4, c, lane)"),
        Edit("sm80/fwd_mod/dropout.cuh", "static_cast<uint32_t>((col0 / 32 + n4) * 8 + 2 * (lane % 4) + c)",
             "static_cast<uint32_t>(n4 * 8 + 2 * (lane % 4) + c)")), "dropout", objects=FWD_MOD80),
    Mutant(1901, "M19 softcap ignored in the backward", "dS is not multiplied by the slope of the cap", (
        Edit("sm80/core/score_gradients.cuh", "if (kThroughSoftcap && m.softcap > 0.f) s *= slope[a][nb][i];",
             ""),
        Edit("sm80/bwd/warps.cuh", "slopes[kb][mb][i] *= acc_p[kb][mb][i];",
             "slopes[kb][mb][i] = acc_p[kb][mb][i];")), "modifiers", objects=BWD_MOD80),
    Mutant(2001, "M20 sink counted in no row", "the denominator goes without the sink", (
        Edit("sm80/fwd_mod/kernel.cuh",
             "m.sinks != nullptr && shared.in_sequence ? m.sinks[w.h] : -INFINITY;", "-INFINITY;"),),
           "bias", objects=FWD_MOD80),
    Mutant(2401, "M24 last writer of a bias gradient wins",
           "what a bias is broadcast over is not summed: the last tile counts", (
        Edit("sm80/bwd_bias/steps.cuh", "sum = fmaf(weight, gradient, sum);", "sum = weight * gradient;"),
        Edit("sm80/bwd_bias/steps.cuh", "[nb][i] += acc_s[unit][0][nb][i];",
             "[nb][i] = acc_s[unit][0][nb][i];")), "bias", objects=DBIAS80),
    Mutant(2701, "bias of another head",
           "a bias that is read element by element takes the head's stride times the batch index", (
        Edit("common/modifiers.cuh", "(seq.b * x.batch_stride + h * x.head_stride) * size +",
             "(seq.b * x.batch_stride + seq.b * x.head_stride) * size +"),), "bias", objects=FWD_MOD80),
    Mutant(2702, "mask word shifted", "a bool mask is read 32 keys too far", (
        Edit("common/hide.cuh", "w = col0 / 32 + lane % Words::kARow;",
             "w = col0 / 32 + 1 + lane % Words::kARow;"),
        Edit("sm80/fwd_mod/mask_words.cuh", "w = col0 / 32 + Words::first_word(lane);",
             "w = col0 / 32 + 1 + Words::first_word(lane);")), "modifiers", objects=FWD_MOD80),
    Mutant(2703, "end of a hidden interval inclusive", "the key at the end of an interval is hidden, too", (
        Edit("common/mask_words.cuh", "~ScoreMod::bits_between(keys.x, keys.y, col0 + 32 * i);",
             "~ScoreMod::bits_between(keys.x, keys.y + 1, col0 + 32 * i);"),),
           "modifiers", objects=FWD_MOD80),
    Mutant(502, "M5 -inf minus -inf not guarded (Hopper)",
           "what is subtracted from the scores of a row that has seen nothing is infinite", (
        Edit("sm90/fwd/weights.cuh",
             "offset[r] = lower == INFINITY ? 0.f : lower;\n"
             "    state.minus_max[r] = lower;\n    state.sum[r] *= factor;",
             "offset[r] = lower;\n    state.minus_max[r] = lower;\n    state.sum[r] *= factor;"),),
           objects=FWD90),
    Mutant(602, "M6 rescale skipped (Hopper)", "the running output keeps its scale when the maximum rises", (
        Edit("sm90/fwd/numbers.cuh", "o[i] *= factor[(i / 2) % 2];", "o[i] *= 1.f;"),),
           "values", objects=FWD90),
    Mutant(705, "M7 wait removed: V of the Hopper forward",
           "weights are multiplied with a tile of V that may not have arrived", (
        Edit("sm90/fwd/consume.cuh",
             "const auto issue_output = [&] {\n    wait(bars.kv_full(ring.stage), ring.phase);\n",
             "const auto issue_output = [&] {\n"),), "races", objects=FWD90),
    Mutant(706, "M7 wait removed: dO of the Hopper backward",
           "dP is computed from a tile of dO that may not have arrived", (
        Edit("sm90/bwd/consume.cuh",
             "      wait(bars.dout_full(ring.stage), ring.phase);\n      ptx::wgmma_fence();\n",
             "      ptx::wgmma_fence();\n"),
        Edit("sm90/bwd/consume_independent.cuh",
             "wait(bars.dout_full(ring.stage), ring.phase);\n      if (!T::kStores", "if (!T::kStores")),
           "races", objects=BWD90),
    Mutant(801, "M8 fence of the async proxy removed: output",
           "TMA stores what threads have written to shared memory without a fence between them", (
        Edit("sm90/fwd/store.cuh", "    ptx::fence_proxy_async();\n    __syncwarp();\n",
             "    __syncwarp();\n"),), "races", objects=FWD90),
    Mutant(802, "M8 fence of the async proxy removed: dS",
           "wgmma reads dS that threads have written to shared memory without a fence between them", (
        Edit("sm90/bwd/consume.cuh", "ds_words);\n        ptx::fence_proxy_async();\n", "ds_words);\n"),
        Edit("sm90/bwd/steps.cuh", "form(1);\n  }\n  ptx::fence_proxy_async();\n",
             "form(1);\n  }\n")), "races", objects=BWD90),
    Mutant(1002, "M10 dout read with the strides of out (Hopper)",
           "rowsum(dO * O) takes strides and alignment of dO from O", (
        Edit("sm90/bwd/passes.cuh",
             "      d[i] = load_8(row_pointer(p.dout, tile.w.b,",
             "      StridedView like_out = p.out;\n      like_out.ptr = p.dout.ptr;\n"
             "      d[i] = load_8(row_pointer(like_out, tile.w.b,"),), "layout", objects=BWD90),
    Mutant(1102, "M11 lse in base 2 (Hopper)", "the logarithm of the sum is taken to base 2", (
        Edit("sm90/fwd/store.cuh", "= logf(sum[half]) - minus_max",
             "= log2f(sum[half]) - minus_max"),), objects=FWD90),
    Mutant(1501, "M15 turns not awaited",
           "in the deterministic mode blocks of keys add to dQ on Hopper whenever they get there", (
        Edit("sm90/bwd/dq_semaphore.cuh", "while (__any_sync(ptx::kFullWarp, (seen & ~kFirst) != block)) {",
             "while (__any_sync(ptx::kFullWarp, false)) {"),
        Edit("sm90/bwd/dq_semaphore.cuh", "come = __ballot_sync(ptx::kFullWarp, (seen & ~kFirst) == block);",
             "come = __ballot_sync(ptx::kFullWarp, (seen & ~kFirst) == block) | 1u;")),
           "races", objects=BWD90),
    Mutant(1602, "M16 deterministic flag ignored (Hopper)",
           "dQ is summed in no order in the deterministic mode, too", (
        Edit("sm90/bwd/launch.cuh", "if (l.dq == DqMode::kOrdered) return", "if (false) return"),),
           "races", objects=BWD90),
    Mutant(1802, "M18 grouped heads by modulo (Hopper)",
           "query head h reads key head h % num_heads_k in the forward", (
        Edit("sm90/fwd/produce.cuh", "static_cast<int>(divide(work.w.h, a.grid.shared));",
             "work.w.h % p.num_heads_k;"),), "layout", objects=FWD90),
    Mutant(2502, "gradient of lse dropped (Hopper)", "dlse is not subtracted from rowsum(dO * O)", (
        Edit("sm90/bwd/passes.cuh", "= dlse[i] - sum;", "= -sum;"),), "autograd", objects=BWD90),
    Mutant(1201, "M12 parts of the keys added up as they are",
           "a part's output keeps the scale of its own maximum", (
        Edit("sm80/split_kv/merge.cuh", "const float factor = s.factor(all.largest, scale);",
             "const float factor = 1.f;"),), "split", objects=SPLIT_KV),
    Mutant(1202, "M12 last keys in no part",
           "blocks of keys that are left over where they do not divide into the parts are left out", (
        Edit("sm80/split_kv/kernel.cuh", "each = (blocks + parts - 1) / parts",
             "each = max(blocks / parts, 1)"),), "split", objects=SPLIT_KV),
    Mutant(1203, "M12 rows of parts numbered by key heads",
           "query heads of a key head leave their parts in one another's places", (
        Edit("sm80/split_kv/rows.cuh", "row) * p.num_heads + h;", "row) * p.num_heads_k + h;"),),
           "split", objects=SPLIT_KV),
    Mutant(1301, "M13 size of a page taken for a power of two",
           "the place of a key in its page is cut out of its bits", (
        Edit("common/kv_rows.cuh", "row - divide(row, c.page_size) * c.page_size.divisor;",
             "row & (c.page_size.divisor - 1);"),), "paged_gpu", objects=SPLIT_KV_CACHED),
    Mutant(1302, "M13 page of another key (Hopper)",
           "of rows that lanes copy, all of a tile but the first have the pages of the first 32", (
        Edit("sm90/fwd_cached/copies.cuh", "entry(keys, c, first - kRows + 32 * held);",
             "entry(keys, c, first - kRows);"),), "paged_gpu", objects=FWD_CACHED90),
    Mutant(1303, "M13 slots behind the last key read (Hopper)",
           "a piece that has a key is copied whole, whatever the slots behind it hold", (
        Edit("sm90/fwd_cached/pieces.cuh", "there = min(max(keys.length - first, 0), rows);",
             "there = first < keys.length ? rows : 0;"),), "paged_gpu", objects=FWD_CACHED90),
    Mutant(1304, "factor of another slot (Hopper)",
           "bytes of the cache are multiplied by the factors of the first slots of their tile", (
        Edit("sm90/fwd_cached/convert.cuh", "copies.factors(raw_ring.stage) + place.row * 4;",
             "copies.factors(raw_ring.stage);"),), "packed_quantized_gpu", objects=PACKED_QUANTIZED90),
    Mutant(2101, "M21 one accumulator of fp8 products",
           "sums over all keys stay in the 14 bits of the tensor cores", (
        Edit("sm90/fwd_fp8/numbers.cuh", "kKeysOfAccumulator = 1024;",
             "kKeysOfAccumulator = 1 << 30;"),), "fp8", objects=FWD_FP8),
    Mutant(2102, "M21 sums in float32 not rescaled",
           "the second accumulator keeps its scale in half of the rows when maxima rise", (
        Edit("sm90/fwd_fp8/totals.cuh", "factor[1] *= by[1];", ""),), "fp8", objects=FWD_FP8),
    Mutant(2103, "M21 columns of V of another sequence",
           "packed sequences read V 16 columns too early for each sequence before them", (
        Edit("sm90/fwd_fp8/produce.cuh", "/ kKeyGroup) + w.b;", "/ kKeyGroup);"),), "fp8", objects=FWD_FP8),
    Mutant(2104, "M21 scores in float16 hidden by their neighbour",
           "of two neighbours both are seen where the first one is", (
        Edit("sm90/fwd_fp8/half_numbers.cuh", "second = bits << (6 - own)",
             "second = bits << (7 - own)"),), "fp8", objects=FWD_FP8),
    Mutant(2105, "M21 far maxima in float16",
           "rows whose maxima float16 rounds by 2^22 and more keep them", (
        Edit("sm90/fwd_fp8/half_numbers.cuh", "kFarHalfMaximum = 1024.f;",
             "kFarHalfMaximum = 1e30f;"),), "fp8", objects=FWD_FP8),
)  # fmt: skip
