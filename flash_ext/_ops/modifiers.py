"""What a call asks for beyond scale and window: biases, masks, sinks, softcap and dropout, ready for use.

The tensors here are already validated and normalised; user input becomes this in
:mod:`flash_ext._attention`. The fields stand in the order of the operators' arguments.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

from torch import Tensor

MASK_GROUP = 64  # rows that a summary of a condensed mask stands for: Modifiers::kMaskGroup


@dataclass(frozen=True, eq=False)
class Modifiers:
    """Normalised modifiers of one attention call; every field defaults to "off".

    A final score is ``softcap(scale * q.k) + bias - slopes * |centre - key|`` with
    ``centre = row + seqlen_k - seqlen_q`` (``row`` alone with ``top_left``). A key takes part when the window
    (together with ``top_left``, ``chunk``, ``sink_tokens`` and ``prefix_lens``) and every mask below let it.
    All per-head tensors count query heads. Written ``X|1`` a dimension has X or 1 elements, the latter
    broadcast. Rows, keys and blocks of packed input count inside their sequence.

    Attributes:
        bias: (batch|1, num_heads|1, seqlen_q|1, seqlen_k|1), float32 or the dtype of q, any strides; added to
            the score. -inf hides a key, the dtype's lowest finite value does not. Packed:
            (batch|1, num_heads|1, R, C), adding 0 beyond R or C where these are not 1.
            With three dimensions a bias by distance, dense or packed: (batch|1, num_heads|1, 2 n + 1),
            float32 (float64 for float64 inputs), contiguous; a score gets the entry
            ``n + clamp(key - centre, -n, n)``.
        mask: same shapes, bool; True lets the key take part. Packed: hidden beyond R or C.
        document_q, document_k: int32 (batch, seqlen_q) and (batch, seqlen_k), or (total_q,) and (total_k,);
            both or neither. A key takes part for rows of its own document; negative ids match nothing.
        prefix_lens: int32 (batch,): the first keys of each sequence, visible to every row whatever the
            window; negative counts as 0.
        hidden_rows: int32 (batch|1, num_heads|1, seqlen_k, 2 n), packed (num_heads|1, total_k, 2 n), n = 1 or
            2: for each key the half-open intervals [start, end) of query rows that may not see it.
        hidden_keys: int32 (batch|1, num_heads|1, seqlen_q, 2 n), packed (num_heads|1, total_q, 2 n): for
            each row the intervals of keys it may not see.
        blocks: bool (batch|1, num_heads|1, ceil(seqlen_q / block_rows), ceil(seqlen_k / block_cols)), any
            strides: which blocks of scores take part. Packed: blocks inside the sequence, hidden beyond.
        slopes: float32 (num_heads,) or (batch, num_heads), the ALiBi slopes.
        sinks: float32 (num_heads,): a logit in the denominator that has no value.
        rng: int64 (2,): seed and offset of the dropout generator, read as unsigned.
        softcap: c > 0 makes the scaled product x into ``c * tanh(x / c)``; 0 is off.
        dropout_p: probability that a weight is dropped, 0..1; see :mod:`flash_ext._cpu.philox`.
        block_rows, block_cols: size of the blocks of ``blocks``, multiples of 16.
        sink_tokens: the first keys of each sequence, visible wherever the window's right edge allows.
        chunk: c > 0 limits a row to the keys of its own chunk of c positions, ``centre // c``; 0 is off.
        top_left: align row i with key i instead of key ``i + seqlen_k - seqlen_q``.
    """

    bias: Tensor | None = None
    mask: Tensor | None = None
    document_q: Tensor | None = None
    document_k: Tensor | None = None
    prefix_lens: Tensor | None = None
    hidden_rows: Tensor | None = None
    hidden_keys: Tensor | None = None
    blocks: Tensor | None = None
    slopes: Tensor | None = None
    sinks: Tensor | None = None
    rng: Tensor | None = None
    softcap: float = 0.0
    dropout_p: float = 0.0
    block_rows: int = 0
    block_cols: int = 0
    sink_tokens: int = 0
    chunk: int = 0
    top_left: bool = False


NAMES = tuple(field.name for field in fields(Modifiers))
NUM_TENSORS = NAMES.index("softcap")  # tensors come first
