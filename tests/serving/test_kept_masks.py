"""What a mask keeps of a step over a cache: for like steps alone, and wrong arguments have their words."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from flash_ext import attention_varlen
from flash_ext._ops import dispatch_cached
from flash_ext.masks import KeyMask
from tests.pages import Cache, make_cache, packed_queries


def step(mask: KeyMask, cache: Cache, count: int = 1, heads: int = 4, **options: Any) -> Tensor:
    torch.manual_seed(count)
    q, bounds, _ = packed_queries([count] * len(cache.rows), heads, 64, "cpu", torch.float32)
    return attention_varlen(q, cache.k, cache.v, bounds, None, mask=mask, **cache.places, **options)


def test_a_further_step_prepares_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that differs in what the mask depends on does, and so does one after the mask's tensor changed."""
    cache, keep = make_cache([40, 9], 8), torch.rand(2, 40) < 0.5
    mask, asked = KeyMask(keep), []
    whole = dispatch_cached.prepared

    def prepared(mask: Any, *rest: Any) -> Any:
        asked.append(mask)
        return whole(mask, *rest)

    monkeypatch.setattr(dispatch_cached, "prepared", prepared)

    def check(**options: Any) -> int:
        """How often that was asked of the mask in two steps; each must be that of a new mask."""
        for _ in range(2):
            assert torch.equal(step(mask, cache, **options), step(KeyMask(keep), cache, **options))
        found = sum(one is mask for one in asked)
        asked.clear()
        return found

    assert [check(), check(count=2), check()] == [1, 1, 0]
    assert [check(heads=2), check(causal=True), check(window_size=(5, 0))] == [1, 1, 1]
    assert [check(), check(causal=True), check()] == [1, 1, 0]  # what is new makes it forget the rest
    keep[:, 3:7] = ~keep[:, 3:7]
    assert [check(), check()] == [1, 0]
    with torch.inference_mode():
        assert check() == 0
    mask.refresh()
    assert check() == 0
    with pytest.raises(ValueError, match="batch"):
        step(mask, make_cache([40], 8))


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"window_size": (-1.0, -1.0)}, "window_size must be a pair of ints"),
        ({"causal": "no"}, "causal"),
        ({"max_seqlen_q": "1"}, "max_seqlen_q must be an int or None"),
        ({"scale": "1"}, "scale must be a float or None"),
        ({"backend": 1}, "backend must be a str or None"),
    ],
    ids=str,
)
def test_wrong_arguments_are_refused_after_a_right_call(wrong: dict[str, Any], words: str) -> None:
    cache, mask = make_cache([40, 9], 8), KeyMask(torch.ones(2, 40, dtype=torch.bool))
    step(mask, cache)
    with pytest.raises(TypeError, match=words):
        step(mask, cache, **wrong)
