"""What masks are to calls: made at the first one, in the form that kernels read, and kept in the mask.

A mask is condensed once for the sizes of a call, its device and its stream. Later calls, forward and backward
and of every layer, find what was made, as long as the version counters of the mask's tensors say that nobody
has written them since.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from .._masks.biases import Bias
from .._masks.block_mask import BlockMask, with_leading
from .._masks.documents import Borders, borders_of, says_documents_alone
from .._masks.lower import Terms, terms_for
from .._masks.operands import four_dimensions, without_repeats
from .._masks.value import Mask, Sizes, is_capturing, is_traced, only_leaf
from .modifiers import MASK_GROUP, Modifiers

MOST_PREPARED = 8  # sizes of calls that one mask keeps what it made for
MOST_ELEMENTS = 2**26  # of cut blocks, a byte each, that are written out at a time


class Prepared(NamedTuple):
    """What a mask is to calls of some sizes.

    Attributes:
        window: (left, right).
        mods: with the fields that masks have, their tensors condensed.
        is_plain: nothing but the window is asked for.
        sources: version counters of the mask's tensors when this was made; None where nobody keeps it.
    """

    window: tuple[int, int]
    mods: Modifiers
    is_plain: bool
    sources: list[int] | None = None


class Kept:
    """What a mask keeps.

    Attributes:
        tensors: those of the mask.
        made: what it made, by sizes, causal, window and place (device and stream, None without tensors). A
            leaf also has what the first expression with no other tensors made, without causal and window.
        in_graphs: those of ``made`` that a CUDA graph reads or writes, for as long as the mask lives.
        is_of_documents: the mask says documents alone.
        borders: of a leaf: where its documents begin (:func:`borders_for`), by sizes and place.
        changes: of a leaf: a tensor that is written when its ids may have changed unseen by their version
            counters: by :meth:`refresh`, or by the replays of a graph that takes them.
        is_in_graphs: of a leaf: such a graph has been captured.
    """

    __slots__ = ("borders", "changes", "in_graphs", "is_in_graphs", "is_of_documents", "made", "tensors")

    def __init__(self, mask: Mask) -> None:
        self.tensors = tuple(mask._tensors())
        self.made: dict[tuple[Any, ...], Prepared] = {}
        self.in_graphs: list[Prepared] = []
        self.is_of_documents = says_documents_alone(mask)
        self.borders: dict[tuple[Any, ...], tuple[Any, Borders | None]] = {}
        with torch.inference_mode(False):  # else nobody counts its versions
            self.changes = torch.empty(0, device="cpu")
        self.is_in_graphs = False

    def versions(self) -> list[int] | None:
        """Version counters; None for inference tensors, of which nobody counts the changes."""
        try:
            return [t._version for t in self.tensors]
        except RuntimeError:
            return None

    def refresh(self, mask: Mask) -> None:
        """See :meth:`flash_ext.masks.Mask.refresh`."""
        versions = self.versions()
        capturing = is_capturing()
        changed = any(found.sources != versions for found in self.made.values())
        if versions is None or (capturing and (changed or not self.made)):
            why = "its tensors were made in inference mode" if versions is None else "it is not prepared"
            raise ValueError(
                f"refresh: {why}, got {mask!r}: make its tensors outside of torch.inference_mode() and one "
                "call with the mask as it is, before a CUDA graph is captured."
            )
        written: set[int] = set()
        for key, found in list(self.made.items()):
            sizes, causal, window, _, device, _ = key
            held = _tensors(found.mods)
            if window is None:  # made by an expression that holds this leaf, and can refresh it
                continue
            if device is not None and not {*map(id, held)} <= written:
                with torch.inference_mode(False), torch.no_grad():
                    fresh = _made(mask, device, sizes, causal, window)
                    for old, new in zip(held, _tensors(fresh.mods), strict=True):
                        old.copy_(new)
                written |= {*map(id, held)}
                if capturing:
                    self.keep(mask, found)
            self.made[key] = found._replace(sources=versions)
        if (leaf := kept_in_leaf(mask)) is not None:
            leaf.changes.zero_()

    def keep(self, mask: Mask, found: Prepared) -> None:
        """For a graph that is being captured, also when ``made`` has no more room for it."""
        if (leaf := kept_in_leaf(mask)) is not None and not leaf.is_in_graphs:
            leaf.is_in_graphs = True
            leaf.changes.zero_()
        if not any(found.mods is one.mods for one in self.in_graphs):
            self.in_graphs.append(found)

    def like(self, key: tuple[Any, ...], versions: list[int]) -> Modifiers | None:
        """What was made for the same sizes at the same place."""
        same = (key[0], *key[3:])
        for other, found in list(self.made.items()):
            if (other[0], *other[3:]) == same and found.sources == versions:
                return found.mods
        return None

    def put(self, key: tuple[Any, ...], found: Prepared) -> None:
        while len(self.made) >= MOST_PREPARED:
            self.made.pop(next(iter(self.made)), None)
        self.made[key] = found


_NOTHING = Modifiers()


def prepared(mask: Mask | None, q: Tensor, sizes: Sizes, causal: bool, window: tuple[int, int]) -> Prepared:
    """What the mask is to this call; made at the first one and kept in the mask until its tensors change.

    Raises:
        ValueError: the mask does not fit, no kernel executes it, or a CUDA graph is being captured and no
            call before has made what this one needs.
    """
    if mask is None:
        right = 0 if causal and window[1] >= -1 else window[1]
        return Prepared((window[0], right), _NOTHING, True)
    if torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active():
        check_devices(mask, "mask", q)
        return _made(mask, q.device, sizes, causal, window)
    kept = kept_in(mask)
    if kept is None or (versions := kept.versions()) is None:
        check_devices(mask, "mask", q)
        return _made(mask, q.device, sizes, causal, window)
    key: tuple[Any, ...] = (sizes, causal, (*window,), torch._C._len_torch_dispatch_stack())
    stream = None
    if kept.tensors and q.is_cuda and torch.cuda.is_initialized():
        if is_capturing():
            check_devices(mask, "mask", q)
            return _for_graph(mask, kept, (*key, q.device), versions)
        # Nothing makes another stream wait for what this one makes.
        stream = torch.cuda.current_stream(q.device).cuda_stream
    key = (*key, q.device if kept.tensors else None, stream)
    found = kept.made.get(key)
    if found is None or found.sources != versions:
        check_devices(mask, "mask", q)
        like = kept.like(key, versions)
        leaf = None if like is not None else only_leaf(mask)
        shared = None if leaf is None or leaf is mask else kept_in(leaf)
        if shared is not None and (of_leaf := shared.versions()) is not None:
            like = shared.like(key, of_leaf)
        with torch.inference_mode(False), torch.no_grad():  # other calls may save it for a backward
            found = _made(mask, q.device, sizes, causal, window, like)
        found = found._replace(sources=versions)
        kept.put(key, found)
        if shared is not None and like is None and of_leaf is not None:
            shared.put((sizes, None, None, *key[3:]), found._replace(sources=of_leaf))
        forget_calls(mask)
    return found


def kept_in(mask: Mask) -> Kept | None:
    """What the mask keeps; None for one that is for one call."""
    kept: Kept | None
    try:
        kept = mask._prepared
    except AttributeError:
        kept = Kept(mask)
        object.__setattr__(mask, "_prepared", kept)
    return kept


def kept_in_leaf(mask: Mask) -> Kept | None:
    """What the only leaf that has tensors keeps."""
    leaf = only_leaf(mask)
    return None if leaf is None else kept_in(leaf)


def leaf_of_documents(mask: Any) -> Kept | None:
    """What the ids of a mask keep that says documents alone, so that calls may run as packed sequences.

    CUDA graphs take ids, which may change between replays, and so do other calls with ids that a graph takes.
    Where a compiler or a transform runs the call ids may have no values.
    """
    if not isinstance(mask, Mask) or is_traced() or is_capturing():
        return None
    kept, leaf = kept_in(mask), kept_in_leaf(mask)
    return None if kept is None or not kept.is_of_documents or leaf is None or leaf.is_in_graphs else leaf


def borders_for(kept: Kept, mods: Modifiers, sizes: Sizes) -> Borders | None:
    """Where documents begin, if they stand together: read back once for ids and place.

    Args:
        kept: see :func:`leaf_of_documents`.
        mods: what the mask is to the call.
    """
    ids, versions = mods.document_q, kept.versions()
    if versions is None or type(ids) is not Tensor or ids.is_meta:
        return None
    stream = torch.cuda.current_stream(ids.device).cuda_stream if ids.is_cuda else None
    key = (sizes.batch, sizes.q_len, ids.device, stream)
    state = (versions, kept.changes._version)
    found = kept.borders.get(key)
    if found is None or found[0] != state:
        with torch.inference_mode(False), torch.no_grad():
            found = state, borders_of(ids[:, : sizes.q_len])
        if len(kept.borders) >= MOST_PREPARED:
            kept.borders.clear()
        kept.borders[key] = found
    return found[1]


def forget_calls(mask: Mask) -> None:
    """Drops the mask's calls (:func:`flash_ext._ops.dispatch.keep_call`), which hold what was made before."""
    calls = getattr(mask, "_calls", None)
    if calls:
        calls.clear()


def _for_graph(mask: Mask, kept: Kept, key: tuple[Any, ...], versions: list[int]) -> Prepared:
    """What was made before the capture, on whichever stream: the capture waits for all of them."""
    for (*found_key, _), found in list(kept.made.items())[::-1]:
        if (*found_key,) == key and found.sources == versions:
            kept.keep(mask, found)
            return found
    sizes = key[0]
    lengths = f"{sizes.q_len} rows and {sizes.k_len} keys"
    if sizes.cached:
        lengths = f"{sizes.q_len} rows and a cache" if sizes.q_len else "a cache"
    raise ValueError(
        f"mask is not prepared for {lengths}, batch {sizes.batch} and "
        f"{sizes.num_heads} heads, and a CUDA graph is being captured: make one call with this mask, these "
        f"sizes and the same causal and window_size before the capture, and keep the mask, got {mask!r}."
    )


def _made(
    mask: Mask,
    device: torch.device,
    sizes: Sizes,
    causal: bool,
    window: tuple[int, int],
    like: Modifiers | None = None,
) -> Prepared:
    """``like``: what calls of another causal or window have made, whose tensors are the same."""
    terms = terms_for(mask, None, sizes, causal, window)
    if like is None:
        mods = _of_terms(terms, device, sizes)
    else:
        mods = replace(like, sink_tokens=terms.sink_tokens, chunk=terms.chunk, top_left=terms.top_left)
    has_tensors = any(t is not None for t in _of_masks(mods))
    is_plain = not (has_tensors or mods.sink_tokens or mods.chunk or mods.top_left)
    return Prepared((terms.left, terms.right), mods, is_plain)


def _tensors(mods: Modifiers) -> list[Tensor]:
    """What a mask has made, each once."""
    return list({id(t): t for t in _of_masks(mods) if t is not None}.values())


def _of_masks(mods: Modifiers) -> tuple[Tensor | None, ...]:
    return (
        mods.mask, mods.document_q, mods.document_k, mods.prefix_lens, mods.hidden_rows, mods.hidden_keys,
        mods.blocks,
    )  # fmt: skip


def check_devices(value: Mask | Bias, name: str, q: Tensor) -> None:
    for tensor in value._tensors():
        if tensor.device != q.device:
            raise ValueError(
                f"{name} must be on the device of q, {q.device}, got one on {tensor.device}, {value!r}. "
                "Move it with .to(q.device)."
            )


def _of_terms(terms: Terms, device: torch.device, sizes: Sizes) -> Modifiers:
    """What a mask asks for in the form of the operators."""
    mask, keys = terms.dense, terms.keys
    if mask is not None:
        mask = four_dimensions(mask, sizes, keep_repeats=False)
    blocks, block_rows, block_cols, cut = None, 0, 0, None
    if terms.blocks is not None:
        blocks, (block_rows, block_cols) = terms.blocks.blocks, terms.blocks.block_size
        blocks = without_repeats(blocks, [0, 1])
        if mask is None:
            cut = _condensed_elements(terms.blocks, sizes)
        elif terms.blocks.bits is not None:
            mask = _both(mask, _elements(terms.blocks, sizes, slice(None)), sizes)
    is_packed = sizes.packed and not sizes.cached
    if keys is not None and mask is None and cut is None and terms.documents is None and not is_packed:
        # As a mask it becomes one bit a key, which costs the kernels less than an id to compare.
        mask, keys = without_repeats(keys, [0])[:, None, None, :], None
    if sizes.cached:
        ids = _documents_over_cache(terms.documents, keys, device, sizes)
        return Modifiers(mask=_condensed(mask), document_q=ids[0], document_k=ids[1])
    document_q, document_k = _documents(terms.documents, keys, device, sizes)
    hidden_rows, hidden_keys = (
        t if t is None else _intervals(t, 3 if sizes.packed else 4)
        for t in (terms.hidden_rows, terms.hidden_keys)
    )
    of_rows = _condensed(document_q)
    return Modifiers(
        mask=_condensed(mask) if cut is None else cut,
        document_q=of_rows,
        document_k=of_rows if document_k is document_q else _condensed(document_k),
        prefix_lens=None if terms.prefix_lens is None else _own(terms.prefix_lens),
        hidden_rows=_condensed(hidden_rows),
        hidden_keys=_condensed(hidden_keys),
        blocks=_condensed(blocks, block_rows, block_cols),
        block_rows=block_rows,
        block_cols=block_cols,
        sink_tokens=terms.sink_tokens,
        chunk=terms.chunk,
        top_left=terms.top_left,
    )


def _own(t: Tensor) -> Tensor:
    """A copy, which stays what it is when the mask's tensor changes."""
    return t.clone(memory_format=torch.contiguous_format)


def _condensed(t: Tensor | None, block_rows: int = 0, block_cols: int = 0) -> Tensor | None:
    """The form that kernels read; a call that is given another one makes it, forward and backward."""
    if t is None:
        return None
    condensed: Tensor = torch.ops.flash_ext.condense.default(t, block_rows, block_cols)
    return condensed


def _both(a: Tensor, b: Tensor, sizes: Sizes) -> Tensor:
    """a AND b. In packed calls either may end before the other; what is missing hides."""
    if not sizes.packed:
        return a & b
    ends = [_end(a.shape[dim], b.shape[dim]) for dim in (2, 3)]
    cut = [t[:, :, : ends[0], : ends[1]] for t in (a, b)]
    return cut[0] & cut[1]


def _end(a: int, b: int) -> int:
    """Size of the intersection of two sizes of which 1 repeats for ever."""
    if a == 1 or b == 1:
        return b if a == 1 else a
    return min(a, b)


def _documents(
    ids: tuple[Tensor, Tensor] | None, keys: Tensor | None, device: torch.device, sizes: Sizes
) -> tuple[Tensor | None, Tensor | None]:
    """Ids of rows and keys; a hidden key is one of no document (-1)."""
    shapes = [(n,) if sizes.packed else (sizes.batch, n) for n in (sizes.q_len, sizes.k_len)]
    ids_q = ids_k = None
    if ids is not None:
        ids_q = ids[0].expand(shapes[0]).contiguous()
        same = ids[0] is ids[1] and shapes[0] == shapes[1]
        ids_k = ids_q if same else ids[1].expand(shapes[1]).contiguous()
    if keys is not None:
        if ids_k is None:
            ids_q = torch.zeros(shapes[0], dtype=torch.int32, device=device)
            ids_k = (keys.to(torch.int32) - 1).contiguous()
        else:
            ids_k = ids_k.masked_fill(~keys, -1)
    return ids_q, ids_k


def _documents_over_cache(
    ids: tuple[Tensor, Tensor] | None, keys: Tensor | None, device: torch.device, sizes: Sizes
) -> tuple[Tensor | None, Tensor | None]:
    """The same as own copies and not condensed, (batch, any) of the keys."""
    if ids is None and keys is None:
        return None, None
    of_rows = (sizes.q_len,) if sizes.packed else (sizes.batch, sizes.q_len)
    if ids is None:
        assert keys is not None
        ids_q, ids_k = torch.zeros(of_rows, dtype=torch.int32, device=device), keys.to(torch.int32) - 1
    else:
        ids_q, ids_k = ids[0].expand(of_rows), with_leading(ids[1], 2)
        if keys is not None:
            count = min(ids_k.shape[1], keys.shape[1])
            ids_k = ids_k[:, :count].where(keys[:, :count], -1)
    return _own(ids_q), _own(ids_k.expand(sizes.batch, ids_k.shape[1]))


def _intervals(t: Tensor, dims: int) -> Tensor:
    """Hidden intervals (batch|1, num_heads|1, length, 2 n), packed without batch; contiguous."""
    return without_repeats(with_leading(t, dims), list(range(dims - 2))).contiguous()


def _elements(block_mask: BlockMask, sizes: Sizes, row_blocks: slice) -> Tensor:
    """The bits of cut blocks written out; on a side on which they repeat, as long as the call."""
    elements = block_mask._elements_of(row_blocks)
    assert elements is not None and block_mask.lengths is not None
    if sizes.packed:
        return elements
    ends = [n if own is None else None for own, n in zip(block_mask.lengths, (sizes.q_len, sizes.k_len))]
    if ends[0] is not None:
        ends[0] = max(ends[0] - (row_blocks.start or 0) * block_mask.block_size[0], 0)
    return elements[:, :, : ends[0], : ends[1]]


def _condensed_elements(block_mask: BlockMask, sizes: Sizes) -> Tensor | None:
    """The same as kernels read them, a bit for each; so many as MOST_ELEMENTS are written out at a time."""
    if block_mask.bits is None:
        return None
    batch, num_heads, row_blocks, key_blocks = block_mask.blocks.shape
    rows, cols = block_mask.block_size
    whole = math.lcm(rows, MASK_GROUP) // rows  # row blocks that are groups as well
    count = max(MOST_ELEMENTS // (batch * num_heads * rows * key_blocks * cols) // whole, 1) * whole
    parts: list[tuple[Tensor, ...]] = []
    for first in range(0, row_blocks, count):
        elements = _elements(block_mask, sizes, slice(first, first + count))
        if parts and not elements.shape[2]:
            break
        condensed = _condensed(elements)
        assert condensed is not None
        if count >= row_blocks:
            return condensed
        own = elements.shape[2]
        if parts and own < MASK_GROUP:  # alone so few rows have no tiles
            with_tiles = _condensed(F.pad(elements, (0, 0, 0, MASK_GROUP - own)))
            assert with_tiles is not None
            condensed = torch.cat([condensed, with_tiles[:, :, -MASK_GROUP:]], dim=2)
        groups = -(-own // MASK_GROUP)
        parts.append(condensed.split([own, groups, groups, groups * MASK_GROUP], dim=2))
    # Rows, then the words that any row of a group sees, those that all see, and tiles (csrc/condensed.h).
    return torch.cat([part[kind] for kind in range(4) for part in parts], dim=2)
