"""What masks and biases have in common: immutable values that combine, compare and travel.

A value holds numbers, tensors and other values in slots that are filled once. It is no dataclass, because
wrappers of modules rebuild dataclasses and cast their tensors.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NamedTuple, NoReturn, TypeVar

import torch
import torch.utils._pytree as pytree
from torch import Tensor

if TYPE_CHECKING:
    from .describe import Description
    from .normal import Normal

V = TypeVar("V", bound="Value")
M = TypeVar("M", bound="Mask")
Alignment = Literal["bottom_right", "top_left"]
ALIGNMENTS: tuple[Alignment, ...] = ("bottom_right", "top_left")


class Sizes(NamedTuple):
    """Sizes of one call. Packed: ``q_len`` and ``k_len`` are the totals of all sequences.

    Cached: keys lie in a cache, of which ``k_len`` says nothing. They count inside their sequence, and what a
    mask has for them begins with the batch, also where queries are packed.
    """

    packed: bool
    batch: int
    num_heads: int
    q_len: int
    k_len: int
    cached: bool = False


class Points(NamedTuple):
    """Pairs of a row and a key, as integer tensors that broadcast with each other.

    ``row`` and ``key`` count inside the sequence ``b``, ``row_at`` and ``key_at`` in the tensors of the call.
    Where nothing is packed they are the same. ``q_len`` and ``k_len`` are the lengths of the sequence.
    """

    b: Tensor
    h: Tensor
    row: Tensor
    key: Tensor
    q_len: Any
    k_len: Any
    row_at: Tensor
    key_at: Tensor
    packed: bool = False

    def centre(self, alignment: Alignment) -> Tensor:
        """The position among the keys at which each row stands."""
        return self.row if alignment == "top_left" else self.row + (self.k_len - self.q_len)


class Value:
    """An immutable object of the fields that its class names.

    Two are equal if their classes and numbers are, and their tensors are the same objects: no values are
    compared, so nothing waits for a device.
    """

    # Calls whose arguments are made, kept after the first (_ops/dispatch.py).
    __slots__ = ("__weakref__", "_calls")
    _calls: dict[tuple[Any, ...], Any]
    _FIELDS: ClassVar[tuple[str, ...]] = ()  # slots, in the order of the constructor's arguments
    _CHILDREN: ClassVar[tuple[str, ...]] = ()  # those that hold tensors or other values
    _KIND: ClassVar[str] = "value"

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        if cls._FIELDS:
            _register(cls)

    def _fill(self, *fields: Any) -> None:
        for name, field in zip(self._FIELDS, fields):
            object.__setattr__(self, name, field)

    def _fields(self) -> tuple[Any, ...]:
        return tuple(getattr(self, name) for name in self._FIELDS)

    def _tensors(self) -> Iterator[Tensor]:
        for name in self._CHILDREN:
            field = getattr(self, name)
            for child in field if isinstance(field, tuple) else (field,):
                if isinstance(child, Tensor):
                    yield child
                elif isinstance(child, Value):
                    yield from child._tensors()

    @property
    def device(self) -> torch.device | None:
        """Where the tensors are; None if there are none.

        Raises:
            ValueError: they are on several devices.
        """
        devices = {tensor.device for tensor in self._tensors()}
        if len(devices) > 1:
            found = " and ".join(sorted(map(str, devices)))
            raise ValueError(f"The tensors of {self!r} must be on one device, got {found}: use .to(device).")
        return devices.pop() if devices else None

    def _lead(self, packed: bool) -> tuple[int, int]:
        """Batch entries and heads that the tensors tell apart, 1 where they repeat."""
        return 1, 1

    def _check(self, sizes: Sizes) -> None:
        """Refuses tensors that do not fit a call."""

    def to(self: V, device: torch.device | str) -> V:
        """The same with its tensors on another device."""
        moved = object.__new__(type(self))
        moved._fill(*(_moved(field, device) for field in self._fields()))
        return moved

    def __setattr__(self, name: str, value: Any) -> NoReturn:
        raise AttributeError(f"A {self._KIND} cannot be changed: make a new {type(self).__name__}.")

    def __delattr__(self, name: str) -> NoReturn:
        raise AttributeError(f"A {self._KIND} cannot be changed: make a new {type(self).__name__}.")

    def _key(self) -> tuple[Any, ...]:
        fields = self._fields()
        return tuple(("tensor", id(field)) if isinstance(field, Tensor) else field for field in fields)

    def __eq__(self, other: object) -> bool:
        return self is other or (type(other) is type(self) and other._key() == self._key())

    def __hash__(self) -> int:
        return hash((type(self), self._key()))

    def __copy__(self: V) -> V:
        return self

    def __getstate__(self) -> tuple[Any, ...]:
        return self._fields()

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        self._fill(*state)

    def __repr__(self) -> str:
        shown = []
        for name, field in zip(self._FIELDS, self._fields()):
            if isinstance(field, Tensor):
                shown.append(f"{name}={in_words(field)}")
            elif name == "alignment" and field != ALIGNMENTS[0]:
                shown.append(repr(field) if len(self._FIELDS) == 1 else f"{name}={field!r}")
            elif name != "alignment" and field is not None:
                shown.append(repr(field))
        return f"{type(self).__name__}({', '.join(shown)})"


def in_words(tensor: Tensor) -> str:
    """dtype, shape and device: values are never shown, because reading them waits for the device."""
    return f"{str(tensor.dtype).removeprefix('torch.')} {tuple(tensor.shape)} {tensor.device}"


def _moved(field: Any, device: torch.device | str) -> Any:
    if isinstance(field, (Tensor, Value)):
        return field.to(device)
    if isinstance(field, tuple):
        return tuple(_moved(part, device) for part in field)
    return field


# ---- pytree: torch.export, torch.func and tree_map see the tensors --------------------------------------


def _register(cls: type[Value]) -> None:
    numbers = tuple(name for name in cls._FIELDS if name not in cls._CHILDREN)

    def flatten(value: Value) -> tuple[list[Any], tuple[Any, ...]]:
        # By name and not by type: a transform puts numbers where tensors were.
        present = tuple(name for name in cls._CHILDREN if getattr(value, name) is not None)
        context = (present, tuple(getattr(value, name) for name in numbers))
        return [getattr(value, name) for name in present], context

    def flatten_with_names(value: Value) -> tuple[list[tuple[Any, Any]], tuple[Any, ...]]:
        children, context = flatten(value)
        return [(pytree.GetAttrKey(name), child) for name, child in zip(context[0], children)], context

    def unflatten(children: Iterable[Any], context: tuple[Any, ...]) -> Value:
        value = object.__new__(cls)  # unchecked, for the same reason
        fields = {**dict(zip(context[0], children)), **dict(zip(numbers, context[1]))}
        value._fill(*(fields.get(name) for name in cls._FIELDS))
        return value

    pytree.register_pytree_node(
        cls,
        flatten,
        unflatten,
        serialized_type_name=f"flash_ext.{cls.__name__}",
        to_dumpable_context=lambda context: context,
        from_dumpable_context=_tuples,
        flatten_with_keys_fn=flatten_with_names,
    )
    torch.serialization.add_safe_globals([cls])  # torch.load takes no other classes by default


def _tuples(context: Any) -> Any:
    """What JSON has made lists of, as tuples."""
    return tuple(map(_tuples, context)) if isinstance(context, list) else context


# ---- masks --------------------------------------------------------------------------------------------


class Mask(Value):
    """Which keys each row sees. Masks combine with ``&``, ``|`` and ``~``.

    Building and combining never raises for what a kernel can do: that is looked at by :meth:`normal`, which
    every call, :meth:`describe` and preparation ask once an object.
    """

    # What calls of some sizes made of it, kept after the first (_ops/prepared.py); None to keep nothing.
    __slots__ = ("_prepared",)
    _prepared: Any
    _KIND = "mask"

    def _fill(self, *fields: Any) -> None:
        super()._fill(*fields)
        if is_capturing():  # its tensors have no values before the replay
            for_one_call(self)

    def __and__(self, other: Any) -> Mask:
        return And((*_parts(self, And), *_parts(_checked_mask(other, "&"), And)))

    def __or__(self, other: Any) -> Mask:
        return Or((*_parts(self, Or), *_parts(_checked_mask(other, "|"), Or)))

    def __rand__(self, other: Any) -> NoReturn:
        _checked_mask(other, "&")
        raise AssertionError  # a mask on the left has its own &

    def __ror__(self, other: Any) -> NoReturn:
        _checked_mask(other, "|")
        raise AssertionError

    def __add__(self, other: Any) -> NoReturn:
        if isinstance(other, Value) and not isinstance(other, Mask):
            return NotImplemented  # type: ignore[misc]  # a bias has words of its own
        raise TypeError("A mask is not added: a & b shows a key that both show, a | b one that either shows.")

    def __invert__(self) -> Mask:
        return Not(self)

    def __bool__(self) -> NoReturn:
        raise TypeError(
            "A mask has no truth value: combine masks with & and | and ~, not with and, or and not, "
            "which would drop one of them."
        )

    def normal(self) -> Normal:
        """The mask in the form that kernels execute; an expression keeps it.

        Raises:
            ValueError: no kernel executes it, whatever is joined to it; the words name the reason and the way
                out. What else no kernel executes is refused by its method ``bands``.
        """
        from .normal import normal_of

        return normal_of(self)

    def to_dense(
        self,
        q_len: int,
        k_len: int,
        *,
        batch: int | None = None,
        num_heads: int | None = None,
        cu_seqlens_q: Tensor | None = None,
        cu_seqlens_k: Tensor | None = None,
        device: torch.device | str | None = None,
    ) -> Tensor:
        """The mask written out by its definition, for tests; also where no kernel executes it.

        Args:
            q_len, k_len: lengths; with ``cu_seqlens_q`` and ``cu_seqlens_k`` the totals of the packed rows.
            batch, num_heads: of the call; None is what the mask's tensors have, 1 where they repeat.
            cu_seqlens_q, cu_seqlens_k: (sequences + 1,) integers, where packed sequences start and end.
            device: of the result; None is that of the mask's tensors, the CPU if it has none.

        Returns:
            bool (batch, num_heads, q_len, k_len), True where the row sees the key. Packed: (1, num_heads,
            q_len, k_len), where rows see keys of their own sequence only.

        Raises:
            ValueError: a tensor of the mask does not fit the lengths.
        """
        from .dense import dense

        if cu_seqlens_q is None and cu_seqlens_k is None:
            return dense(self, q_len, k_len, batch, num_heads, None, device)
        if cu_seqlens_q is None or cu_seqlens_k is None:
            raise ValueError("cu_seqlens_q and cu_seqlens_k belong together, got one of them.")
        return dense(self, q_len, k_len, batch, num_heads, (cu_seqlens_q, cu_seqlens_k), device)

    def describe(
        self, q_len: int, k_len: int, *, batch: int | None = None, num_heads: int | None = None
    ) -> Description:
        """What the mask leaves to do: its density, its tiles and the memory of its condensed form.

        Evaluates the rule piece by piece, 4 million pairs at most, and reads the counts back.

        Args:
            q_len, k_len, batch, num_heads: as in :meth:`to_dense`.
        """
        from .describe import describe

        return describe(self, q_len, k_len, batch, num_heads)

    def refresh(self) -> None:
        """Condenses the mask's tensors again, into the memory that earlier calls left.

        Calls see by themselves when a tensor has changed. A CUDA graph does not: it reads what was there when
        it was captured. As the first line inside the capture, this puts the passes into the graph, once for
        all layers, and each replay follows the tensors.

        Raises:
            ValueError: a graph is being captured and no call before has prepared the mask as it is, or its
                tensors were made in inference mode.
        """
        kept = getattr(self, "_prepared", None)
        if kept is not None:
            kept.refresh(self)

    def plot(
        self, q_len: int, k_len: int, ax: Any = None, *, batch_index: int = 0, head_index: int = 0
    ) -> Any:
        """A picture by matplotlib: rows downwards, keys to the right, dark where a row sees a key.

        A picture has at most 512 points in each direction; a point of a longer mask is the mean of its pairs.

        Args:
            q_len, k_len: lengths.
            ax: axes to draw on; None makes some.
            batch_index, head_index: which batch entry and query head.

        Returns:
            The axes.

        Raises:
            ImportError: matplotlib is not installed.
        """
        from .describe import plot

        return plot(self, q_len, k_len, ax, batch_index, head_index)

    def to_mask_mod(self, q_len: int, k_len: int) -> Any:
        """The same mask as a ``mask_mod`` of ``torch.nn.attention.flex_attention``.

        FlexAttention counts rows and keys from 0, so the function holds the lengths.
        """
        from .convert import to_mask_mod

        return to_mask_mod(self, q_len, k_len)

    def to_torch(
        self,
        q_len: int,
        k_len: int,
        *,
        batch: int | None = None,
        num_heads: int | None = None,
        block_size: int | tuple[int, int] = 128,
    ) -> Any:
        """The same mask as a ``torch.nn.attention.flex_attention.BlockMask``, built piece by piece.

        Args:
            q_len, k_len, batch, num_heads: as in :meth:`to_dense`.
            block_size: (rows, cols) of a block, or one number; multiples of 16.
        """
        from .convert import to_torch

        return to_torch(self, q_len, k_len, batch, num_heads, block_size)

    # What each class says of itself.

    def _shown(self, points: Points, negated: bool) -> Tensor:
        """bool, where the mask shows the key to the row, or with ``negated`` where its opposite does."""
        shown = self._rule(points)
        return ~shown if negated else shown

    def _rule(self, points: Points) -> Tensor:
        raise NotImplementedError


def leaves(mask: Mask) -> Iterator[Mask]:
    """The masks that an expression is made of, from left to right."""
    if isinstance(mask, (And, Or)):
        for part in mask.masks:
            yield from leaves(part)
    elif isinstance(mask, Not):
        yield from leaves(mask.mask)
    else:
        yield mask


def only_leaf(mask: Mask) -> Mask | None:
    """The one leaf that has tensors; None if there are more or none, or something is negated."""
    found = {id(leaf): leaf for leaf in leaves(mask) if leaf._CHILDREN}
    return found.popitem()[1] if len(found) == 1 and not _negates(mask) else None


def _negates(mask: Mask) -> bool:
    return isinstance(mask, Not) or (isinstance(mask, _Join) and any(map(_negates, mask.masks)))


class _Join(Mask):
    """Several masks joined by one sign, flat and in the order written."""

    __slots__ = ("_normal", "masks")
    _SIGN: ClassVar[str]
    masks: tuple[Mask, ...]
    _normal: Normal

    def __init__(self, masks: tuple[Mask, ...]) -> None:
        self._fill(masks)

    def normal(self) -> Normal:
        if torch.compiler.is_compiling():
            return super().normal()
        try:
            return self._normal
        except AttributeError:
            # It holds the parts and not this mask, which would keep itself alive.
            object.__setattr__(self, "_normal", super().normal())
            return self._normal

    def _lead(self, packed: bool) -> tuple[int, int]:
        return joint_lead(self, self.masks, packed)

    def _check(self, sizes: Sizes) -> None:
        for mask in self.masks:
            mask._check(sizes)

    def __repr__(self) -> str:
        parts = (f"({mask!r})" if isinstance(mask, _Join) else repr(mask) for mask in self.masks)
        return f" {self._SIGN} ".join(parts)


class And(_Join):
    """Made by ``&``."""

    __slots__ = ()
    _FIELDS = _CHILDREN = ("masks",)
    _SIGN = "&"

    def _shown(self, points: Points, negated: bool) -> Tensor:
        return _folded(self.masks, points, negated, every=not negated)


class Or(_Join):
    """Made by ``|``."""

    __slots__ = ()
    _FIELDS = _CHILDREN = ("masks",)
    _SIGN = "|"

    def _shown(self, points: Points, negated: bool) -> Tensor:
        return _folded(self.masks, points, negated, every=negated)


class Not(Mask):
    """Made by ``~``."""

    __slots__ = ("mask",)
    _FIELDS = _CHILDREN = ("mask",)
    mask: Mask

    def __init__(self, mask: Mask) -> None:
        self._fill(mask)

    def __invert__(self) -> Mask:
        return self.mask

    def _shown(self, points: Points, negated: bool) -> Tensor:
        return self.mask._shown(points, not negated)

    def _lead(self, packed: bool) -> tuple[int, int]:
        return self.mask._lead(packed)

    def _check(self, sizes: Sizes) -> None:
        self.mask._check(sizes)

    def __repr__(self) -> str:
        return f"~({self.mask!r})" if isinstance(self.mask, _Join) else f"~{self.mask!r}"


def _folded(masks: tuple[Mask, ...], points: Points, negated: bool, every: bool) -> Tensor:
    shown = masks[0]._shown(points, negated)
    for mask in masks[1:]:
        other = mask._shown(points, negated)
        shown = shown & other if every else shown | other
    return shown


def joint_lead(whole: Value, parts: Iterable[Value], packed: bool) -> tuple[int, int]:
    """Those batch entries and heads of all parts."""
    leads = [part._lead(packed) for part in parts]
    try:
        batch, num_heads = torch.broadcast_shapes(*leads)
    except RuntimeError:
        found = " and ".join(map(str, dict.fromkeys(leads)))
        raise ValueError(
            f"The tensors of {whole!r} must agree in batch and num_heads, or have 1, got {found}."
        ) from None
    return batch, num_heads


def for_one_call(mask: M) -> M:
    """The mask, which keeps nothing: one that is made for each call, or while a CUDA graph is captured."""
    object.__setattr__(mask, "_prepared", None)
    return mask


def is_capturing() -> bool:
    """Whether what runs on the current stream goes into a CUDA graph."""
    if torch.compiler.is_compiling() or not torch.cuda.is_initialized():
        return False
    return torch.cuda.is_current_stream_capturing()


def is_traced() -> bool:
    """Whether a compiler or a transform runs the call, whose tensors may have no numbers to look at."""
    return (
        torch.compiler.is_compiling()
        or torch._C._len_torch_dispatch_stack() > 0
        or torch._C._are_functorch_transforms_active()
        or torch._C._get_tracing_state() is not None
    )


def _parts(mask: Mask, join: type[_Join]) -> tuple[Mask, ...]:
    return mask.masks if isinstance(mask, join) else (mask,)


def _checked_mask(other: Any, sign: str) -> Mask:
    if isinstance(other, Mask):
        return other
    cure = ""
    if isinstance(other, Tensor):
        bias = " A float one is a bias: it is added, bias=DenseBias(tensor)."
        cure = " A bool tensor is a mask as Dense(tensor)." if other.dtype == torch.bool else bias
    elif isinstance(other, Value):
        cure = " A bias is added to the scores: give it as bias=, beside the mask."
    raise TypeError(f"{sign} joins masks, got {type(other).__qualname__}.{cure}")
