"""Tables of the ladder's rows."""

from __future__ import annotations

from collections.abc import Sequence

Row = dict[str, object]

DATASHEET = 989.4  # TFLOP/s of an H100 or H200, dense bf16

# Section: title, and columns as (key, heading, format, factor).
TABLES: dict[str, tuple[str, tuple[tuple[str, str, str, float], ...]]] = {
    "errors": ("Largest error against float64", (("error_vs_float64", "error", ".1e", 1.0),)),
    "softmax": (
        "Softmax of long rows",
        (("ms", "ms", ".3f", 1.0), ("counted_bytes", "counted GB", ".2f", 1e-9),
         ("gbps", "counted GB/s", ".0f", 1.0)),
    ),
    "tiles": ("Tiles that were tried", (("ms", "ms", ".3f", 1.0), ("tflops", "TFLOP/s", ".0f", 1.0))),
    "lengths": ("Attention by length", (("ms", "ms", ".3f", 1.0), ("tflops", "TFLOP/s", ".0f", 1.0))),
    "backward": (
        "Backward by length",
        (("ms", "ms", ".3f", 1.0), ("tflops", "TFLOP/s", ".0f", 1.0),
         ("tflops", "% of 989 TFLOP/s", ".0f", 100 / DATASHEET)),
    ),
    "heads": ("One batch entry, few heads", (("ms", "ms", ".3f", 1.0), ("tflops", "TFLOP/s", ".1f", 1.0))),
    "breakdown": ("Parts of standard attention, causal, dropout 0.1", (("ms", "ms", ".3f", 1.0),)),
    "forward only": (
        "A forward alone: bytes beyond inputs and output",
        (("peak_bytes", "peak KiB", ".0f", 1 / 1024), ("kept_bytes", "kept KiB", ".0f", 1 / 1024),
         ("lse_bytes", "lse KiB", ".0f", 1 / 1024), ("ms", "ms", ".4f", 1.0)),
    ),
    "profile": (
        "Counted by the hardware",
        (("ms", "ms", ".3f", 1.0), ("dram_read_bytes", "memory read, GB", ".3f", 1e-9),
         ("dram_written_bytes", "memory written, GB", ".3f", 1e-9),
         ("l2_read_bytes", "L2 read, GB", ".3f", 1e-9), ("l2_written_bytes", "L2 written, GB", ".3f", 1e-9),
         ("shared_wavefronts", "shared memory, M", ".0f", 1e-6),
         ("ctas", "CTAs", ".0f", 1.0), ("warps_active_pct", "warps of a busy SM, %", ".0f", 1.0),
         ("busy_pct", "SMs busy, %", ".0f", 1.0)),
    ),
}  # fmt: skip


def shape_name(shape: Sequence[int]) -> str:
    """(batch, heads, seqlen, head_dim) as B4 H32 N4096 d64; of softmax, rows x length."""
    if len(shape) == 2:
        return f"{shape[0]} x {shape[1]}"
    return "B{} H{} N{} d{}".format(*shape)


def cell(row: Row, key: str, form: str, factor: float) -> str:
    """A number as its column has it; empty where the row has none."""
    value = row.get(key)
    return format(float(value) * factor, form) if isinstance(value, (int, float)) else ""


def as_text(rows: Sequence[Row]) -> str:
    """A Markdown table for each section that has rows."""
    parts = []
    for section, (title, columns) in TABLES.items():
        found = [dict(row) for row in rows if row["section"] == section]
        for row in found:
            if section == "softmax" and "ms" in row and "counted_bytes" in row:
                row["gbps"] = float(row["counted_bytes"]) / float(row["ms"]) * 1e-6  # type: ignore[arg-type]
        if found:
            used = [column for column in columns if any(column[0] in row for row in found)]
            head = ["shape", "what", *(heading for _, heading, _, _ in used)]
            lines = [f"{title}\n", f"| {' | '.join(head)} |", "|---" * len(head) + "|"]
            for row in found:
                words = [cell(row, key, form, factor) for key, _, form, factor in used]
                if "error" in row:
                    words[0] = str(row["error"])[:60]
                shape = row["shape"]
                assert isinstance(shape, list)
                lines.append(f"| {' | '.join([shape_name(shape), str(row['name']), *words])} |")
            parts.append("\n".join(lines))
    return "\n\n".join(parts)
