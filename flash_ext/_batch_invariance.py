"""Results that do not depend on what else is in the call: :func:`set_batch_invariant`.

The mode is one of the process, as that of ``torch.use_deterministic_algorithms``, and not an argument of each
call: it does not change what is computed, only which roundings are possible, and whoever wants it wants it of
calls that other libraries make, too.
"""

from __future__ import annotations

import contextlib
import threading

from ._log import logged
from ._ops.library import _C

_SWITCH = "batch_invariant"
_switching = threading.Lock()  # between reading the former mode and setting another


@logged
def set_batch_invariant(mode: bool) -> contextlib.ExitStack:
    """Turns the batch-invariant mode on or off, at once and for the whole process.

    With the mode on, on one GPU model and build, out, lse, dq, dk and dv of a sequence do not depend on
    which other sequences are in the call, how many, how long or of what content: bit for bit, for packed
    sequences and along the batch dimension of dense calls. Tensors must lie alike (strides and alignment),
    and masks and biases be given in the same form (which dimensions are broadcast, whether a BlockMask has
    elements); with dropout the sequence keeps its number, on which its draws depend. Not promised: equal
    bits between a packed and a dense call; gradients of biases, slopes and sinks, which are sums over the
    batch; results on the CPU.

    A kernel that suits one batch size is then used for all. Forwards do not take the tiles that are made
    for few sequences, keys of packed calls are not split, those of dense calls into a number of parts that
    the lengths alone give, and backwards are deterministic and do not divide query heads. On an H200
    forwards of a few thousand rows take 1.0 to 1.3 times as long, dense decoding 1.0 to 1.26 times, packed
    decoding 2.6 times, backwards 1.1 to 1.2 times, and twice where few key heads serve many
    (docs/benchmarks.md). Backwards with masks or modifiers run in their deterministic kernels, which above
    head_dim 128 are those of every call; at 128 they have 0.55 to 1.0 of the others' speed, with a 16-bit
    bias 0.29.

    The mode is read once for each call, when its kernels are launched. A CUDA graph keeps that of its
    capture, and a backward goes by the mode that is on when it runs. Threads share the mode: of ``with``
    statements that overlap in time, the last to end leaves what it found. The integration of transformers,
    which leaves out masks that hide nothing, leaves out none while the mode is on. Calls that
    :func:`flash_ext.enable_sdpa` hands back to PyTorch are PyTorch's.

    Source: "Defeating Nondeterminism in LLM Inference", He and Thinking Machines Lab 2025, has the reasons
        to want this.

    Args:
        mode: True for on, False for off.

    Returns:
        An object that may be ignored, for a mode that stays, or used in a ``with`` statement, at whose end
        the former mode is restored.

    Raises:
        TypeError: ``mode`` is not a bool.
        ImportError: the extension module is missing; the message says what mends it.
    """
    if not isinstance(mode, bool):
        raise TypeError(f"mode must be a bool, got {type(mode).__name__}.")
    with _switching:
        before = is_batch_invariant()
        _set(mode)
    undo = contextlib.ExitStack()
    undo.callback(_set, before)
    return undo


@logged
def is_batch_invariant() -> bool:
    """Whether the mode of :func:`set_batch_invariant` is on."""
    return bool(_C.get_switch(_SWITCH))


def _set(mode: bool) -> None:
    _C.set_switch(_SWITCH, int(mode) or None)
