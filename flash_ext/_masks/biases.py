"""Biases: what is added to the scores, and gets gradients."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch import Tensor

from .atoms import _read, check_broadcast, if_exchanged
from .value import Mask, Points, Sizes, Value, in_words, joint_lead

if TYPE_CHECKING:
    from .describe import BiasDescription


class Bias(Value):
    """What is added to the scores. Biases are joined with ``+``."""

    __slots__ = ()
    _KIND = "bias"

    def __add__(self, other: Any) -> Bias:
        return Sum((*terms_of(self), *terms_of(_checked_bias(other))))

    def __radd__(self, other: Any) -> NoReturn:
        _checked_bias(other)
        raise AssertionError  # a bias on the left has its own +

    def __bool__(self) -> NoReturn:
        raise TypeError("A bias has no truth value: join biases with +.")

    def to_dense(self, q_len: int, k_len: int, *, top_left: bool = False) -> Tensor:
        """The bias written out, differentiable: to look at, and for tests.

        Args:
            q_len, k_len: numbers of rows and of keys.
            top_left: the first row has the position of the first key; else the last row has that of the last
                key. Only biases by distance look at it.

        Returns:
            (batch or 1, num_heads or 1, q_len, k_len), floating.
        """
        raise NotImplementedError

    def describe(
        self, q_len: int, k_len: int, *, batch: int | None = None, num_heads: int | None = None
    ) -> BiasDescription:
        """What the bias costs in memory, and whether kernels execute it.

        Reads shapes, dtypes and strides, no values. The sum of several DenseBias is made for it, as calls do.

        Args:
            q_len, k_len: numbers of rows and of keys.
            batch, num_heads: of the call; None is what the bias's tensors have, 1 where they repeat.

        Raises:
            ValueError: a tensor does not fit the sizes.
        """
        from .describe import describe_bias

        return describe_bias(self, q_len, k_len, batch, num_heads)

    def plot(
        self, q_len: int, k_len: int, ax: Any = None, *, batch_index: int = 0, head_index: int = 0
    ) -> Any:
        """A picture by matplotlib: rows downwards, keys to the right, numbers by colour, with their bar.

        A picture has at most 512 points in each direction; a point of a longer bias is the mean of its finite
        numbers. Points without any, as where all are -inf, are blank.

        Args:
            q_len, k_len: numbers of rows and of keys; the last row has the position of the last key.
            ax: axes to draw on; None makes some.
            batch_index, head_index: which batch entry and query head.

        Returns:
            The axes.

        Raises:
            ImportError: matplotlib is not installed.
            ValueError: a tensor does not fit the lengths, or an index is none of the bias's.
        """
        from .describe import plot_bias

        return plot_bias(self, q_len, k_len, ax, batch_index, head_index)

    def _rule(self, points: Points) -> Tensor:
        """The numbers at some pairs of rows and keys, the last row at the position of the last key."""
        raise NotImplementedError


class Sum(Bias):
    """Several biases joined by ``+``, flat and in the order written."""

    __slots__ = ("biases",)
    _FIELDS = _CHILDREN = ("biases",)
    biases: tuple[Bias, ...]

    def __init__(self, biases: tuple[Bias, ...]) -> None:
        self._fill(biases)

    def to_dense(self, q_len: int, k_len: int, *, top_left: bool = False) -> Tensor:
        dense = [bias.to_dense(q_len, k_len, top_left=top_left) for bias in self.biases]
        total = dense[0]
        for term in dense[1:]:
            total = total + term
        return total

    def _rule(self, points: Points) -> Tensor:
        total = self.biases[0]._rule(points)
        for bias in self.biases[1:]:
            total = total + bias._rule(points)
        return total

    def _lead(self, packed: bool) -> tuple[int, int]:
        return joint_lead(self, self.biases, packed)

    def _check(self, sizes: Sizes) -> None:
        for bias in self.biases:
            bias._check(sizes)

    def __repr__(self) -> str:
        return " + ".join(map(repr, self.biases))


def terms_of(bias: Bias) -> tuple[Bias, ...]:
    """The biases that a sum is made of."""
    return bias.biases if isinstance(bias, Sum) else (bias,)


def _checked_bias(other: Any) -> Bias:
    if isinstance(other, Bias):
        return other
    cure = ""
    if isinstance(other, Tensor) and other.is_floating_point():
        cure = " A float tensor is a bias as DenseBias(tensor)."
    elif isinstance(other, (Tensor, Mask)):
        cure = " A mask shows or hides: give it as mask=, beside the bias."
    raise TypeError(f"+ joins biases, got {type(other).__qualname__}.{cure}")


class DenseBias(Bias):
    """A number for each pair of row and key, added to the score; -inf hides the key.

    Args:
        tensor: floating point, 1 to 4 dimensions that broadcast from the right to (batch, num_heads, q_len,
            k_len); it may require a gradient, which is summed over the broadcast dimensions. Calls take
            float32 or the dtype of q. Packed and over a cache: (batch, num_heads, rows, keys) inside each
            sequence, adding 0 beyond.

    Raises:
        TypeError, ValueError: the tensor does not fit.

    Example:
        >>> flash_ext.masks.DenseBias(torch.zeros(8, 1, 64))
        DenseBias(tensor=float32 (8, 1, 64) cpu)
    """

    __slots__ = ("tensor",)
    _FIELDS = _CHILDREN = ("tensor",)
    tensor: Tensor

    def __init__(self, tensor: Tensor) -> None:
        _check_floating(tensor, "tensor", "A mask of True and False is Dense(tensor), and goes into mask=.")
        if not 1 <= tensor.dim() <= 4:
            raise ValueError(f"tensor must have 1 to 4 dimensions, got shape {tuple(tensor.shape)}.")
        self._fill(tensor)

    def to_dense(self, q_len: int, k_len: int, *, top_left: bool = False) -> Tensor:
        tensor = self.tensor[(None,) * (4 - self.tensor.dim())]
        return tensor.expand(*tensor.shape[:2], q_len, k_len)

    def _rule(self, points: Points) -> Tensor:
        return _read(self.tensor, *points[:4][4 - self.tensor.dim() :])

    def _lead(self, packed: bool) -> tuple[int, int]:
        shape = (1, 1, 1, 1, *self.tensor.shape)
        return shape[-4], shape[-3]

    def _check(self, sizes: Sizes) -> None:
        check_broadcast(self.tensor, "DenseBias", sizes)


class ALiBi(Bias):
    """slope * distance is subtracted from the scores, where the distance is abs(position of the row - key).

    Row i has the position i + k_len - q_len, or i beside masks with the alignment "top_left".

    Source: Press et al. 2022, https://arxiv.org/abs/2108.12409.

    Args:
        slopes: (num_heads,) or (batch, num_heads), floating point; it may require a gradient.

    Raises:
        TypeError, ValueError: the slopes do not fit.

    Example:
        >>> flash_ext.masks.ALiBi(torch.tensor([0.5, 0.25]))
        ALiBi(slopes=float32 (2,) cpu)
    """

    __slots__ = ("slopes",)
    _FIELDS = _CHILDREN = ("slopes",)
    slopes: Tensor

    def __init__(self, slopes: Tensor) -> None:
        _check_floating(slopes, "slopes", "Convert it with .float().")
        if not 1 <= slopes.dim() <= 2:
            raise ValueError(
                f"slopes must have shape (num_heads,) or (batch, num_heads), got {tuple(slopes.shape)}."
            )
        self._fill(slopes)

    def to_dense(self, q_len: int, k_len: int, *, top_left: bool = False) -> Tensor:
        position = torch.arange(q_len, device=self.slopes.device) + (0 if top_left else k_len - q_len)
        distance = (torch.arange(k_len, device=self.slopes.device) - position[:, None]).abs()
        slopes = self.slopes if self.slopes.dim() == 2 else self.slopes[None]
        return -slopes[..., None, None] * distance

    def _rule(self, points: Points) -> Tensor:
        slopes = _read(self.slopes, *(points.b, points.h)[2 - self.slopes.dim() :])
        return -slopes * (points.key - points.centre("bottom_right")).abs()

    def _lead(self, packed: bool) -> tuple[int, int]:
        shape = (1, *self.slopes.shape)
        return shape[-2], shape[-1]

    def _check(self, sizes: Sizes) -> None:
        given = tuple(self.slopes.shape)

        def fits(sizes: Sizes) -> bool:
            return given in ((sizes.num_heads,), (sizes.batch, sizes.num_heads))

        if not fits(sizes):
            raise ValueError(
                f"ALiBi: slopes must have shape (num_heads,) or (batch, num_heads), here "
                f"({sizes.num_heads},) or ({sizes.batch}, {sizes.num_heads}), got {given}."
                f"{if_exchanged(sizes, fits)}"
            )


def _check_floating(tensor: Any, name: str, cure: str) -> None:
    if not isinstance(tensor, Tensor):
        raise TypeError(f"{name} must be a torch.Tensor, got {type(tensor).__qualname__}.")
    if not tensor.is_floating_point():
        raise TypeError(f"{name} must be floating point, got {in_words(tensor)}. {cure}")
