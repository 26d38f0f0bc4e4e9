"""What a call would launch: kernels, tiles, scheduling, workspace, and why it is these.

``python -m flash_ext.info --plan "bwd batch=4 seqlen=4096 heads=32/8 head_dim=128 causal alibi"``
"""

from __future__ import annotations

import re
from typing import Any

import torch

from .library import _C

HELP = (
    "print what a call would launch, e.g. 'bwd batch=4 seqlen=4096/8192 heads=32/8 head_dim=192/128 causal "
    "deterministic alibi' or 'fwd pages int8 seqlen=1/8192 heads=32/8'; gpu=9.0/132 plans for a GPU of that "
    "compute capability and so many multiprocessors"
)

# Shared memory that one block may have, bytes, by compute capability (CUDA C++ programming guide).
_SHARED_MEMORY = {(8, 0): 166912, (8, 7): 166912, (9, 0): 232448, (10, 0): 232448}
_SMALL_SHARED_MEMORY = 101376
_L2_BYTES = 60 << 20  # an H200's
_H200 = "9.0/132"

_NUMBERS = {
    "batch": "1", "seqlen": "4096", "heads": "16", "head_dim": "128", "window_size": "", "page_size": "64",
    "max_seqlen": "0", "gpu": "",
}  # fmt: skip
_CONSTRAINTS = (
    "sm90",
    "sm80",
    "row",
    "kv_splits",
    "gqa_splits",
    "q_splits",
    "fwd_block_m",
    "wide_tiles",
    "dq_pool",
    "short_kernels",
)
_CACHES = ("pages", "entries", "rows")
_EIGHT_BITS = ("e4m3", "int8")
_WORDS = (
    "fwd", "bwd", "causal", "packed", "deterministic", "float16", "bfloat16", "without_qkv", "wide",
    "seqused", "slot_factors", *_CACHES, *_EIGHT_BITS,
)  # fmt: skip


def _pair(text: str) -> tuple[int, int]:
    """ "a/b", or "a" for both."""
    first, _, second = text.partition("/")
    return int(first), int(second or first)


def facts(gpu: str) -> tuple[int, int, int, int, int]:
    """Compute capability, multiprocessors, bytes of shared memory a block and of L2 cache, of "9.0/132"."""
    found = re.fullmatch(r"(\d+)\.(\d+)/(\d+)", gpu)
    if found is None:
        raise ValueError(f"gpu= takes CAPABILITY/MULTIPROCESSORS, as {_H200}; got {gpu}")
    major, minor, multiprocessors = map(int, found.groups())
    shared = _SHARED_MEMORY.get((major, minor), _SMALL_SHARED_MEMORY)
    return major, minor, multiprocessors, shared, _L2_BYTES


def plan(text: str) -> dict[str, Any]:
    """The plan of a call in words, as ``torch.ops.flash_ext`` would run it.

    Args:
        text: words in any order: "fwd" (default) or "bwd"; "float16" or "bfloat16" (default); "causal",
            "packed" (seqlen is that of each sequence), "deterministic"; batch=B, seqlen=Q/K, heads=H/Hk,
            head_dim=D/Dv, window_size=LEFT/RIGHT (one number for both); gpu=CAPABILITY/MULTIPROCESSORS, by
            default GPU 0, or an H200 where there is none; "sm90", "sm80" and constraints as ``backend=`` of
            :func:`flash_ext.attention` takes them, as row=NAME or kv_splits=N; and modifiers: softcap, alibi,
            bias (1, heads, Q, K), full_bias (batch, heads, Q, K), float_bias (in fp32), relative, dropout,
            mask, key_padding, query_padding (a mask of one column), blocks, documents, hidden_rows,
            hidden_keys, chunk, prefix, sink_tokens, sinks;
            or "fp8" or "mixed" alone, for :func:`flash_ext.fp8.attention_fp8` of what quantize_fp8 makes, or
            "any_fp8", of what Fp8Inputs.of does, and where the largest scores are asked for. "seqused" beside
            one of these: how many keys a sequence has is on the device alone (seqused_k).
            Backwards: alibi, the biases, relative and sinks followed by _gradient want that gradient as well;
            "without_qkv" wants no others; "wide" has dq, dk and dv in fp32.
            Keys in a cache: "pages" (page_size=N), "entries" (one a sequence) or, with "packed", "rows", of
            16 bits or "e4m3" or "int8". K is the room of a sequence, max_seqlen=Q/K are bounds that the call
            gives, and modifiers are softcap, alibi, the biases, relative, the masks and paddings, documents,
            sinks and tree. "slot_factors" beside 8 bits: each slot has a factor (k_descale, v_descale), not
            each head.

    Returns:
        A dict: "backend", "row" (of the table in csrc/plan/), "evidence" (id of a measurement in
        docs/evidence.md), "kernel", "launches" (in order), "workspace" (bytes by part), "workspace_bytes",
        "splits" (of the keys), "gqa_splits" (splits of grouped heads), "q_splits" (of the queries), "reasons"
        (why other backends refuse); where gradients of sinks or of a bias of rows have a plan of their own,
        "then": that plan.

    Raises:
        ValueError: a word that is not known, or numbers out of range.
        RuntimeError: the GPU could not be read.
    """
    numbers, words, modifiers, backend = dict(_NUMBERS), set(), [], []
    for word in text.split():
        name, equals, value = word.partition("=")
        if name in _CONSTRAINTS:
            backend.append(word)
        elif equals:
            if name not in numbers:
                known = (*numbers, *_CONSTRAINTS[2:])
                raise ValueError(f"unknown {name}=; known: {', '.join(f'{n}=' for n in known)}")
            numbers[name] = value
        elif word in _WORDS:
            words.add(word)
        else:
            modifiers.append(word)
    (seqlen_q, seqlen_k), (heads, heads_k), (head_dim, head_dim_v) = (
        _pair(numbers[name]) for name in ("seqlen", "heads", "head_dim")
    )
    left, right = _pair(numbers["window_size"]) if numbers["window_size"] else (-1, -1)
    gpu = numbers["gpu"] or ("" if torch.cuda.is_available() else _H200)
    if {"fwd", "bwd"} <= words:
        raise ValueError("either fwd or bwd")
    caches, eight_bits = sorted(words & {*_CACHES}), sorted(words & {*_EIGHT_BITS})
    if len(caches) > 1 or len(eight_bits) > len(caches):
        raise ValueError(
            f"a cache is one of {', '.join(_CACHES)}, and beside it may stand {' or '.join(_EIGHT_BITS)}"
        )
    batch = int(numbers["batch"])
    rows = batch if "packed" in words else 1  # packed lengths are those of all sequences together
    keys = seqlen_k * (1 if {"pages", "entries"} & words else rows)  # of a cache the room of a sequence
    found = _C.plan(
        "bwd" if "bwd" in words else "fwd",
        dtype="float16" if "float16" in words else "bfloat16",
        batch=batch,
        seqlen_q=rows * seqlen_q,
        seqlen_k=keys,
        num_heads=heads,
        num_heads_k=heads_k,
        head_dim=head_dim,
        head_dim_v=head_dim_v,
        packed="packed" in words,
        window_size_left=left,
        window_size_right=0 if "causal" in words else right,
        deterministic="deterministic" in words,
        modifiers=modifiers,
        backend=" ".join(sorted(backend, key=lambda word: "=" in word)),
        gpu=facts(gpu) if gpu else None,
        tma=head_dim % 8 == 0 and head_dim_v % 8 == 0,  # rows of contiguous tensors begin on 16 bytes
        need_qkv="without_qkv" not in words,
        cache=(caches[0], "".join(eight_bits), int(numbers["page_size"])) if caches else None,
        max_seqlen=_pair(numbers["max_seqlen"]),
        own_lengths="seqused" in words,
        slot_factors="slot_factors" in words,
        wide="wide" in words,
    )
    return {"call": text, "gpu": gpu or "GPU 0", **found}


def as_text(plan: dict[str, Any]) -> str:
    """For a reader at a terminal."""
    lines = [f"call        {plan['call']}", f"gpu         {plan['gpu']}"]
    lines += [f"assumed     {sentence}" for sentence in plan.get("assumed", ())]
    if plan["backend"] is None:
        return "\n".join([*lines, *(f"not {name}    {why}" for name, why in plan["reasons"].items())])
    return "\n".join([*lines, *_lines_of(plan)])


def _lines_of(plan: dict[str, Any]) -> list[str]:
    evidence = f", evidence {plan['evidence']}" if plan["evidence"] else ""
    lines = [f"row         {plan['row']}{evidence}"]
    if plan["splits"] > 1:
        lines.append(f"split-KV    {plan['splits']} parts of the keys")
    if plan["gqa_splits"] > 1:
        lines.append(f"GQA splits  {plan['gqa_splits']} a key head")
    if plan["q_splits"] > 1:
        lines.append(f"Q splits    {plan['q_splits']} a block of keys")
    for launch in plan["launches"]:
        line = f"launch      {launch['kernel']}"
        words = [f"{name} {launch[name]}" for name in ("variant", "dq") if name in launch]
        line += f" ({', '.join(words)})" if words else ""
        if "block_m" in launch:
            scheduling = "dynamic" if launch["dynamic"] else "static"
            line += (f": tile {launch['block_m']} x {launch['block_n']}, {launch['stages']} stages, "
                     f"{launch['threads']} threads, {launch['smem_bytes']} bytes of shared memory, "
                     f"{launch['grid']} CTAs for {launch['tiles']} tiles, {scheduling}")  # fmt: skip
        if "rows" in launch:
            first, last = launch["rows"]
            line += f", sequences of {first} {f'to {last}' if last else 'or more'} rows a key head"
        lines.append(line + (", programmatic launch" if launch["pdl"] else ""))
    lines += [f"workspace   {name} {size} bytes" for name, size in plan["workspace"].items()]
    lines.append(f"workspace   {plan['workspace_bytes']} bytes in all")
    if "then" in plan:
        lines += ["then, for other gradients", *_lines_of(plan["then"])]
    return lines
