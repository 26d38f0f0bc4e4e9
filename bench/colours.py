"""What each column is called in a picture, and its colour: the same in every picture of the project."""

from __future__ import annotations

OURS = "flash_ext"
# Okabe and Ito's palette, safe for colour-blind readers, and ten more.
COLOURS = {
    OURS: "#D55E00",
    f"{OURS}, deterministic": "#E69F00",
    f"{OURS}, sm80": "#8C564B",
    f"{OURS}, sm80, deterministic": "#C49C94",
    f"{OURS}, fp8": "#B2182B",
    f"{OURS}, fp8, rotated": "#DE77AE",
    f"{OURS}, fp8, mixed": "#F4A582",
    f"{OURS}, fp8, quantised in the call": "#762A83",
    "PyTorch": "#0072B2",
    "FlashAttention-2 (PyTorch)": "#009E73",
    "FlashAttention-3": "#000000",
    "FlashAttention-3, fp8": "#4D4D4D",
    "FlashAttention-4": "#56B4E9",
    "FlashAttention-2 (Triton)": "#AA4499",
    "cuDNN": "#CC79A7",
    "cuDNN, fp8": "#44AA99",
    "memory-efficient (PyTorch)": "#B8A200",
    "FlexAttention": "#332288",
    "materialised": "#7F7F7F",
}
# Of what is no library: stages of an algorithm, parts of a time, kinds of bytes.
OTHER_COLOURS = ("#6699CC", "#DDCC77", "#99CC99", "#CC99BB", "#88CCEE", "#661100", "#117733")
_LABELS = {
    "fp8": f"{OURS}, fp8",
    "fp8-hadamard": f"{OURS}, fp8, rotated",
    "mixed": f"{OURS}, fp8, mixed",
    "fp8+quantise": f"{OURS}, fp8, quantised in the call",
    "fa3-fp8": "FlashAttention-3, fp8",
    "cudnn-fp8": "cuDNN, fp8",
    "fa2": "FlashAttention-2 (PyTorch)",
    "fa3": "FlashAttention-3",
    "fa4": "FlashAttention-4",
    "triton": "FlashAttention-2 (Triton)",
    "cudnn": "cuDNN",
    "mem": "memory-efficient (PyTorch)",
    "flex": "FlexAttention",
    "math": "materialised",
    "sdpa": "PyTorch",
}


def label_of(name: str, default: str = "") -> str:
    """What a picture calls a column.

    Args:
        name: of the column.
        default: our path that a call takes by itself in this run, the first of our columns.
    """
    path, _, rest = name.partition("-")
    if rest not in ("", "det"):
        return _LABELS.get(name, name)
    ours = path if path in ("auto", "sm90", "sm80", "cpu") else ""
    parts = [OURS if ours else _LABELS.get(path, path)]
    parts += [ours] if ours and ours != default else []
    parts += ["deterministic"] if rest else []
    return ", ".join(parts)
