"""Biases in the form of the operators, and what calls keep of them."""

from __future__ import annotations

import torch
from torch import Tensor

from .biases import Bias, DenseBias, terms_of
from .block_mask import with_leading
from .lower import Terms
from .value import Sizes


def operands_of(
    terms: Terms, sizes: Sizes, statistic: torch.dtype, keep_repeats: bool
) -> tuple[Tensor | None, Tensor | None]:
    """Bias and slopes in the shapes of the operators.

    Args:
        statistic: dtype of slopes and of a bias by distance.
        keep_repeats: leave an expanded bias as it is, because its gradient is wanted in its own shape.
    """
    total, slopes = terms.bias, terms.slopes
    if total is not None:
        total = four_dimensions(total, sizes, keep_repeats)
    if terms.position is not None:
        total = terms.position.by_distance(statistic).contiguous()
    return total, None if slopes is None else slopes.to(statistic).contiguous()


def four_dimensions(t: Tensor, sizes: Sizes, keep_repeats: bool) -> Tensor:
    """(batch|1, num_heads|1, rows|1, keys|1), in which what an expand repeats has size 1."""
    t = with_leading(t, 4)
    ends_freely = sizes.packed or sizes.cached
    return t if keep_repeats else without_repeats(t, [0, 1] if ends_freely else [0, 1, 2, 3])


def without_repeats(t: Tensor, dims: list[int]) -> Tensor:
    """``t`` with its expanded dimensions (stride 0) narrowed to 1, so that the kernels know they repeat.

    With a gradient this is done past the expand, from the tensor that was expanded: the kernels then sum over
    the repeats, and no gradient is written out in full. Where that tensor is unknown, as when compiling, or
    ``t`` collects a gradient of its own, every element must get its own gradient, and ``t`` stays as it is.
    """
    repeated = [dim for dim in dims if t.stride(dim) == 0 and t.shape[dim] > 1]
    if not repeated:
        return t
    if t.requires_grad:
        base = _expanded_tensor(t)
        if base is None:
            return t
        size = [1 if dim in repeated else n for dim, n in enumerate(t.shape)]
        return base.as_strided(size, t.stride(), t.storage_offset())
    for dim in repeated:
        t = t.narrow(dim, 0, 1)
    return t


def _expanded_tensor(t: Tensor) -> Tensor | None:
    """The tensor that ``t`` is a view of, if the gradient of ``t`` goes there and nowhere else."""
    if torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active():
        return None
    base = t._base
    if base is None or t.is_leaf or t.retains_grad or t._backward_hooks:
        return None
    repeats = any(stride == 0 and n > 1 for stride, n in zip(base.stride(), base.shape))
    is_plain = type(base) in (Tensor, torch.nn.Parameter) and base.dtype == t.dtype
    return base if is_plain and base.requires_grad and not repeats else None


# ---- what calls keep -----------------------------------------------------------------------------------


def sources_of_bias(
    bias: Bias, total: Tensor | None, slopes: Tensor | None
) -> tuple[Tensor | None, list[Tensor]] | None:
    """The tensor that is read in place as the bias, with fewer dimensions, and what the others are made of.

    None where a gradient goes through what was made, or nobody counts the changes of its tensor.
    """
    given, made_of = None, []
    for part in terms_of(bias):
        (source,) = part._tensors()
        if isinstance(part, DenseBias) and total is not None and _is_view_of(total, source):
            given = source
        elif source is not slopes:
            made_of.append(source)
    if any(t.requires_grad or t.is_inference() for t in made_of):
        return None
    return given, made_of


def may_be_copied(source: Tensor, longest: int, head_dim: int) -> bool:
    """Whether a bias has rows that calls would copy, forward and backward (csrc/bias_rows.h)."""
    if source.requires_grad or source.is_inference() or source.shape[-1] == 1:
        return False
    short_rows = 80 if head_dim <= 80 else 64  # csrc/short_tiles.h: those kernels read it as it is
    if longest <= short_rows:
        return False
    return source.stride(-1) != 1 or not has_aligned_rows(source)


def with_aligned_rows(bias: Tensor) -> Tensor:
    """A copy (batch|1, num_heads|1, rows|1, keys) whose rows begin on 16 bytes."""
    cols = bias.shape[3]
    with torch.inference_mode(False), torch.no_grad():
        rows = bias.new_zeros(*bias.shape[:3], -(-cols // 8) * 8)[..., :cols]
        return rows.copy_(bias)


def _is_view_of(bias: Tensor, source: Tensor) -> bool:
    """Whether they are the same but for dimensions of size 1 in front."""
    lead = bias.dim() - source.dim()
    same = bias.shape[lead:] == source.shape and bias.stride()[lead:] == source.stride()
    return same and bias.data_ptr() == source.data_ptr() and bias.dtype == source.dtype


def has_aligned_rows(t: Tensor) -> bool:
    """Whether each row of elements begins on 16 bytes; strides of dimensions of size 1 say nothing."""
    strides = (stride for stride, size in zip(t.stride()[:-1], t.shape[:-1]) if size > 1)
    return t.data_ptr() % 16 == 0 and all(stride * t.element_size() % 16 == 0 for stride in strides)
