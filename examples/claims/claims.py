"""The claims of the source articles, and what was measured here for each."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from examples.ladder.measure import operations
from examples.ladder.report import DATASHEET
from examples.ladder.rungs import RUNGS

from .evidence import Evidence, Row, benchmark_times, number, pairs, shape_of, span

NOT_MEASURED = "not measured"

# What was measured, and where; None where nothing is stored.
Answer = tuple[str, str] | None


@dataclass(frozen=True)
class Claim:
    """One line of the table.

    Attributes:
        who: article (000 to 004, as docs/articles.md numbers them) and what it quotes.
        what: the claim, with its number.
        measure: the answer from evidence.
    """

    who: str
    what: str
    measure: Callable[[Evidence], Answer]


BACKWARD_SHARE = "FlashAttention reaches 25 to 35 % of the peak backward"
MULTIPROCESSORS = 132  # of an H100 or H200
PARTS = ("matmul q k", "mask", "softmax", "dropout", "matmul p v")  # of standard attention


def _ladder_ratio(slow: str, fast: str) -> Callable[[Evidence], Answer]:
    """Speed of one rung over another over lengths, apart where there are fewer heads than multiprocessors."""

    def measure(evidence: Evidence) -> Answer:
        file = evidence.file("ladder")
        groups: dict[tuple[int, bool], list[float]] = {}
        for shape, ratio in pairs(file.of("lengths"), slow, fast, shape_of).items():
            assert isinstance(shape, tuple)
            groups.setdefault((shape[3], shape[0] * shape[1] >= MULTIPROCESSORS), []).append(ratio)
        if not groups:
            return None
        parts = []
        for head_dim in sorted({head_dim for head_dim, _ in groups}):
            full, few = (groups.get((head_dim, is_full)) for is_full in (True, False))
            words = [span(full, unit="x")] if full else []
            words += [f"with fewer heads than SMs {span(few, unit='x')}"] if few else []
            parts.append(f"head_dim {head_dim} {', '.join(words)}")
        return "; ".join(parts), file.where

    return measure


def _share_of_peak(name: str) -> Callable[[Evidence], Answer]:
    def measure(evidence: Evidence) -> Answer:
        file = evidence.file("ladder")
        rates = [
            number(row, "tflops") for row in file.of("lengths") if row["name"] == name and "tflops" in row
        ]
        if not rates:
            return None
        return f"{span([100 * rate / DATASHEET for rate in rates], '.0f', ' %')} of 989 TFLOP/s", file.where

    return measure


def _backward_shares(evidence: Evidence) -> Answer:
    """Shares of the peak of every backward that the ladder times."""
    file = evidence.file("ladder")
    shares: dict[str, list[float]] = {}
    for row in file.of("backward"):
        if "tflops" in row:
            shares.setdefault(str(row["name"]), []).append(100 * number(row, "tflops") / DATASHEET)
    parts = [f"{RUNGS[name].label} {span(found, '.0f', ' %')}" for name, found in shares.items()]
    return (f"{', '.join(parts)} of 989 TFLOP/s", file.where) if parts else None


def _headline_share(direction: str) -> Callable[[Evidence], Answer]:
    def measure(evidence: Evidence) -> Answer:
        file = evidence.file("headline")
        parts = []
        for name, label in (("fa2", "PyTorch's FlashAttention-2"), ("sm90", "flash_ext")):
            found = benchmark_times(file, direction, name)
            best = [
                rate for (_, causal, seqlen), (_, rate) in found.items() if not causal and seqlen == 16384
            ]
            if best:
                parts.append(f"{label} {span([100 * x / DATASHEET for x in best], '.0f', ' %')}")
        return (f"{', '.join(parts)} of 989 TFLOP/s at 16k", file.where) if parts else None

    return measure


def _matrix_product(evidence: Evidence) -> Answer:
    """Of the runs that measured one, at their start."""
    found = {
        file.where: 100 * file.ceilings["matmul_tflops"] / DATASHEET
        for file in map(evidence.file, ("ladder", "headline"))
        if "matmul_tflops" in file.ceilings
    }
    text = f"8192 x 8192 x 8192 in bf16: {', '.join(f'{share:.0f}' for share in found.values())} %"
    return (f"{text} of 989 TFLOP/s", "; ".join(found)) if found else None


def _best_16_bits(evidence: Evidence) -> Answer:
    """Of the newest run in each type, each with its place."""
    parts, places = [], []
    for dtype, kind, name in (("fp16", "fp16", "sm90-fp16"), ("bf16", "headline", "sm90")):
        file = evidence.file(kind)
        rates = [rate for _, rate in benchmark_times(file, "fwd", name).values()]
        if rates:
            parts.append(f"in {dtype} {max(rates):.0f}")
            places.append(file.where)
    return (f"flash_ext {', '.join(parts)} TFLOP/s", "; ".join(places)) if parts else None


def _fp8(evidence: Evidence) -> Answer:
    """The fastest row of the benchmark's column of that name, and the other columns there."""
    file = evidence.file("fp8")
    found = benchmark_times(file, "fwd", "fp8")
    if not found:
        return None
    at = max(found, key=lambda key: found[key][1])
    words = [f"flash_ext in fp8 {found[at][1]:.0f} TFLOP/s"]
    for name, label in (("auto", "in bf16"), ("cudnn-fp8", "cuDNN"), ("fa3-fp8", "vLLM's FlashAttention-3")):
        others = benchmark_times(file, "fwd", name)
        words += [f"{label} {others[at][1]:.0f}"] if at in others else []
    return ", ".join(words), file.where


def _causal(evidence: Evidence) -> Answer:
    file = evidence.file("headline")
    parts = []
    for direction, label in (("fwd", "forward"), ("bwd", "backward")):
        found = benchmark_times(file, direction, "sm90")
        ratios = {
            s: found[(128, False, s)][0] / ms
            for (d, causal, s), (ms, _) in found.items()
            if d == 128 and causal
        }
        if ratios:
            words = ", ".join(f"{ratios[s]:.2f}" for s in sorted(ratios))  # type: ignore[type-var]
            parts.append(f"{label} {words}")
    return (f"head_dim 128, 512 to 16k: {'; '.join(parts)}", file.where) if parts else None


def _training(model: str, seqlen: int) -> Callable[[Evidence], Answer]:
    def measure(evidence: Evidence) -> Answer:
        file = evidence.file("training")
        for row in file.rows:
            entries = row["entries"]
            assert isinstance(entries, list)
            rate = {e["name"]: e["tokens_per_s"] for e in entries if e["tokens_per_s"]}
            if (
                row["model"] == model
                and row["seqlen"] == seqlen
                and {"flash_ext", "materialised"} <= set(rate)
            ):
                return f"{rate['flash_ext'] / rate['materialised']:.2f}x standard attention", file.where
        return None

    return measure


def _training_rate(evidence: Evidence) -> Answer:
    file = evidence.file("training")
    rates: dict[str, list[float]] = {}
    for row in file.rows:
        entries = row["entries"]
        assert isinstance(entries, list)
        rates.setdefault(str(row["model"]), []).extend(
            e["tflops"] for e in entries if e["name"] == "flash_ext" and e["tflops"]
        )
    parts = [f"{name} {span(found, '.0f')} TFLOP/s" for name, found in rates.items() if found]
    return ("; ".join(parts), file.where) if parts else None


def _memory(evidence: Evidence) -> Answer:
    file = evidence.file("claims")
    peaks: dict[object, dict[str, Row]] = {}
    for row in file.of("memory"):
        peaks.setdefault(row["seqlen"], {})[str(row["name"])] = row
    parts = []
    for seqlen, of in peaks.items():
        ours, theirs = of.get("flash_ext"), of.get("standard")
        if ours and ours["peak_bytes"] and theirs:
            ratio = (
                number(theirs, "peak_bytes") / number(ours, "peak_bytes") if theirs["peak_bytes"] else None
            )
            parts.append(f"{seqlen}: {f'{ratio:.1f}x' if ratio else 'standard out of memory'}")
    return (
        (f"forward and backward of attention alone, by length: {', '.join(parts)}", file.where)
        if parts
        else None
    )


def _encoder(section: str, label: str) -> Callable[[Evidence], Answer]:
    def measure(evidence: Evidence) -> Answer:
        file = evidence.file("claims")
        rows = file.of(section)
        parts = []
        for slow, name in (("standard", "standard attention"), ("PyTorch", "PyTorch's choice")):
            found = pairs(rows, slow, "flash_ext", lambda row: row["seqlen"])
            if found:
                words = ", ".join(f"{found[s]:.2f}x" for s in sorted(found))  # type: ignore[type-var]
                parts.append(f"{words} over {name}")
        return (f"{label}: {'; '.join(parts)}", file.where) if parts else None

    return measure


def _contexts(evidence: Evidence) -> Answer:
    file = evidence.file("claims")
    groups: dict[tuple[object, object], list[Row]] = {}
    for row in file.of("contexts"):
        groups.setdefault((row["window"], row["steps"]), []).append(row)
    parts = []
    for (window, steps), rows in groups.items():
        words = ", ".join(f"context {row['name']} {number(row, 'held_out'):.3f}" for row in rows)
        parts.append(f"after {steps} steps of {window} bytes: {words}")
    return (f"nats a byte of held-out Python {'; '.join(parts)}", file.where) if parts else None


def _breakdown(evidence: Evidence) -> Answer:
    file = evidence.file("ladder")
    ms = {str(row["name"]): number(row, "ms") for row in file.of("breakdown")}
    if not set(PARTS) <= set(ms):
        return None
    total, between = sum(ms[x] for x in PARTS), sum(ms[x] for x in PARTS[1:4])
    words = f"{100 * between / total:.0f} % of {total:.2f} ms"
    return f"{words}; flash_ext does all of it in {ms['flash_ext']:.2f} ms", file.where


def _softmax(evidence: Evidence) -> Answer:
    file = evidence.file("ladder")
    parts = []
    for shape in dict.fromkeys(shape_of(row) for row in file.of("softmax")):
        ms = {str(row["name"]): number(row, "ms") for row in file.of("softmax") if shape_of(row) == shape}
        if {"three", "two", "blocks"} <= set(ms):
            chip = f", on chip {ms['on chip']:.2f}" if "on chip" in ms else ""
            times = f"three passes {ms['three']:.2f} ms, two {ms['two']:.2f}, blocks {ms['blocks']:.2f}{chip}"
            parts.append(f"rows of {shape[1]}: {times}")
    return ("; ".join(parts), file.where) if parts else None


def _theorem(evidence: Evidence) -> Answer:
    file = evidence.file("ladder")
    counted = {
        (r["name"], shape_of(r)): number(r, "counted_bytes")
        for r in file.of("lengths")
        if "counted_bytes" in r
    }
    parts = []
    for row in file.of("profile"):
        key = (row["name"], shape_of(row))
        if key in counted and shape_of(row)[3] == 64 and "l2_read_bytes" in row:
            l2 = (number(row, "l2_read_bytes") + number(row, "l2_written_bytes")) * 1e-9
            dram = (number(row, "dram_read_bytes") + number(row, "dram_written_bytes")) * 1e-9
            parts.append(f"{row['name']} {counted[key] * 1e-9:.2f} / {l2:.2f} / {dram:.2f}")
    return (f"GB counted / through L2 / of memory: {', '.join(parts)}", file.where) if parts else None


def _blocks(evidence: Evidence) -> Answer:
    """Speed of FlashAttention by the number of its thread blocks: one for each batch entry and head."""
    file = evidence.file("ladder")
    rates: dict[int, float] = {}
    for row in file.of("lengths"):
        batch, num_heads, seqlen, head_dim = shape_of(row)
        if row["name"] == "fa1" and "tflops" in row and head_dim == 64 and seqlen >= 1024:
            rates[batch * num_heads] = number(row, "tflops")
    words = ", ".join(f"{blocks} blocks {rates[blocks]:.0f}" for blocks in sorted(rates, reverse=True))
    return (f"head_dim 64 on {MULTIPROCESSORS} SMs, TFLOP/s: {words}", file.where) if rates else None


def _memory_bound(evidence: Evidence) -> Answer:
    """Shares of the rate of a copy and of a matrix product, by the bytes that ncu counted."""
    file = evidence.file("ladder")
    if not file.ceilings:
        return None
    parts = []
    for row in file.of("profile"):
        batch, num_heads, seqlen, head_dim = shape_of(row)
        if row["name"] not in ("standard", "flash_ext") or batch == 1 or "dram_read_bytes" not in row:
            continue
        seconds = number(row, "ms") * 1e-3
        moved = number(row, "dram_read_bytes") + number(row, "dram_written_bytes")
        copy = moved / seconds * 1e-9 / file.ceilings["copy_gbps"]
        product = operations(batch, num_heads, seqlen, head_dim) / seconds * 1e-12
        product /= file.ceilings["matmul_tflops"]
        parts.append(f"{row['name']}, head_dim {head_dim}: {100 * copy:.0f} and {100 * product:.0f} %")
    head = "of the rates of a copy and of a matrix product: "
    return (head + "; ".join(parts), file.where) if parts else None


def _few_heads(evidence: Evidence) -> Answer:
    file = evidence.file("ladder")
    found = pairs(file.of("heads"), "fa2-one-cta", "fa2-ladder", shape_of)
    if not found:
        return None
    by_shape: dict[tuple[int, ...], list[str]] = {}
    for shape, ratio in found.items():
        assert isinstance(shape, tuple)
        by_shape.setdefault(shape[2:], []).append(f"{ratio:.0f}x")
    text = "; ".join(f"length {n}, head_dim {d}: {', '.join(words)}" for (n, d), words in by_shape.items())
    return f"one batch entry with 1, 2, 4, 8 heads: {text}", file.where


def _occupancy(evidence: Evidence) -> Answer:
    file = evidence.file("ladder")
    parts = []
    for row in file.of("profile"):
        if shape_of(row)[:2] == (1, 1) and row["name"] in ("fa1", "fa2-ladder") and "busy_pct" in row:
            parts.append(
                f"{row['name']} {number(row, 'ctas'):.0f} CTAs, {number(row, 'busy_pct'):.0f} % of SMs busy"
            )
    return (f"one head of 4096: {'; '.join(parts)}", file.where) if parts else None


def _shared(evidence: Evidence) -> Answer:
    file = evidence.file("ladder")
    parts = []
    for row in file.of("profile"):
        if shape_of(row)[0] > 1 and row["name"] in ("fa1", "fa2-ladder") and "shared_wavefronts" in row:
            parts.append(
                f"head_dim {shape_of(row)[3]} {row['name']} {number(row, 'shared_wavefronts') * 1e-6:.0f} M"
            )
    return (f"accesses of shared memory, length 4096: {', '.join(parts)}", file.where) if parts else None


def _forward_only(evidence: Evidence) -> Answer:
    file = evidence.file("ladder")
    rows = {str(row["name"]): row for row in file.of("forward only")}
    alone, graph = rows.get("no_grad"), rows.get("with a graph")
    if alone is None or graph is None or alone.get("kept_bytes") is None:
        return None
    text = (f"kept beside the output: {number(graph, 'kept_bytes') / 1024:.0f} KiB with a graph, "
            f"{number(alone, 'kept_bytes') / 1024:.0f} under no_grad")  # fmt: skip
    with_lse, without = rows.get("fa2-ladder, with lse"), rows.get("fa2-ladder, without lse")
    if with_lse and without:
        change = 100 * (number(with_lse, "ms") / number(without, "ms") - 1)
        text += f"; storing it costs a kernel {change:+.1f} % of its time"
    return text, file.where


CLAIMS = (
    Claim("001", "FlashAttention-2 is 200 % faster than FlashAttention (title), or 2x, or 2 to 3x (text)",
          _ladder_ratio("fa1", "fa2-ladder")),
    Claim("001", "of it by work along the sequence", _ladder_ratio("fa2-one-cta", "fa2-ladder")),
    Claim("001", "of it by dividing once", _ladder_ratio("fa2-divided", "fa2-ladder")),
    Claim("001, 002", "FlashAttention is 2 to 4x as fast as standard attention",
          _ladder_ratio("standard", "fa1")),
    Claim("001", "FlashAttention reaches 25 to 40, or 30 to 50 % of the peak forward", _share_of_peak("fa1")),
    Claim("001", BACKWARD_SHARE, _backward_shares),
    Claim("001", "a matrix product reaches 80 to 90 % of the peak", _matrix_product),
    Claim("001", "FlashAttention-2 reaches 73 % of the peak forward (A100); more than 50 % was the aim",
          _headline_share("fwd")),
    Claim("001", "FlashAttention-2 reaches 63 % of the peak backward (A100)", _headline_share("bwd")),
    Claim("001", "225 TFLOP/s a GPU in whole training (A100)", _training_rate),
    Claim("001", "a causal mask makes it 1.7 to 1.8x as fast", _causal),
    Claim("001", "with few heads, work along the sequence fills the GPU", _few_heads),
    Claim("001", "FlashAttention leaves multiprocessors idle", _occupancy),
    Claim("001", "one thread block for each batch entry and head is enough from 80 of them on (108 SMs)",
          _blocks),
    Claim("001", "FlashAttention-2 needs fewer reads and writes of shared memory", _shared),
    Claim("001", "10 to 20x less memory", _memory),
    Claim("002", "BERT-large trains 15 % faster than the MLPerf 1.1 record",
          _encoder("bert", "BERT-large, 512 tokens")),
    Claim("002", "GPT-2 with 1k tokens trains 3x as fast", _training("gpt2-medium", 1024)),
    Claim("002", "the Long Range Arena with 1k to 4k tokens trains 2.4x as fast",
          _encoder("arena", "small encoder, 1k, 2k, 4k tokens")),
    Claim("002, 004", "mask, softmax and dropout take most of the time of standard attention", _breakdown),
    Claim("002, 003, 004", "standard attention is bound by memory", _memory_bound),
    Claim("002", "K and V are read once, Q and O once per key block (theorem 2)", _theorem),
    Claim("003", "safe softmax reads its row three times, or twice", _softmax),
    Claim("003", "a longer context makes better models", _contexts),
    Claim("004", "lse may be left out of a forward alone", _forward_only),
    Claim("FlashAttention-3 paper, named by 004", "740 TFLOP/s in fp16", _best_16_bits),
    Claim("FlashAttention-3 paper, named by 004", "1.2 PFLOP/s in fp8", _fp8),
)  # fmt: skip


# ---- other tables of docs/articles.md: head and lines ----------------------------------------------------

Lines = tuple[list[str], list[list[str]]]


def breakdown(evidence: Evidence) -> Lines:
    """Milliseconds of the parts of standard attention, and of flash_ext."""
    ms = {str(row["name"]): number(row, "ms") for row in evidence.file("ladder").of("breakdown")}
    ms["together"] = sum(ms[part] for part in PARTS)
    names = [*PARTS, "together", "flash_ext", "flash_ext, no dropout"]
    return names, [[f"{ms[name]:.2f}" for name in names]]


MOVED = ("standard", "fa1", "fa2-one-cta", "fa2-ladder", "triton", "mem", "fa2", "flash_ext")


def moved(evidence: Evidence) -> Lines:
    """What ncu counted of the first shape that it saw, beside what the theorem counts."""
    file = evidence.file("ladder")
    seen = file.of("profile")
    counted = {(r["name"], shape_of(r)): r.get("counted_bytes") for r in file.of("lengths")}
    lines = []
    for row in seen:
        if row["name"] in MOVED and shape_of(row) == shape_of(seen[0]):
            of_theorem = counted.get((row["name"], shape_of(row)))
            sums = [f"{(number(row, f'{at}_read_bytes') + number(row, f'{at}_written_bytes')) * 1e-9:.2f}"
                    for at in ("l2", "dram")]  # fmt: skip
            lines.append([RUNGS[str(row["name"])].label,
                          f"{of_theorem * 1e-9:.2f}" if isinstance(of_theorem, int) else "", *sums,
                          f"{number(row, 'shared_wavefronts') * 1e-6:.0f}",
                          f"{number(row, 'ctas'):.0f}" if row["kernels"] == 1 else ""])  # fmt: skip
    return ["kernel", "counted", "L2 cache", "memory", "shared memory accesses, millions", "CTAs"], lines


def speeds(evidence: Evidence) -> Lines:
    """Head and lines of a table: TFLOP/s of every rung by head_dim and length."""
    rows = [row for row in evidence.file("ladder").of("lengths") if "tflops" in row]
    rates = {(row["name"], shape_of(row)): f"{number(row, 'tflops'):.0f}" for row in rows}
    shapes = sorted({shape for _, shape in rates if shape[2] >= 1024}, key=lambda shape: (shape[3], shape[2]))
    head = ["kernel", *(f"{head_dim}, {seqlen}" for *_, seqlen, head_dim in shapes)]
    lines = [
        [rung.label, *(rates.get((name, shape), "") for shape in shapes)]
        for name, rung in RUNGS.items()
        if any(name == of for of, _ in rates)
    ]
    return head, lines


def table(evidence: Evidence) -> list[tuple[str, str, str, str]]:
    """(claimed, by whom, measured here, on what), a line for each claim."""
    lines = []
    for claim in CLAIMS:
        answer = claim.measure(evidence)
        measured, where = answer if answer is not None else (NOT_MEASURED, "")
        lines.append((claim.what, claim.who, measured, where))
    return lines
