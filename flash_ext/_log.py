"""A log of calls for bug reports, by the environment variable FLASH_EXT_LOG; read once, at import.

======  ==================================================================================================
level   what goes to standard error, through the logger "flash_ext"
======  ==================================================================================================
0       nothing (default); the functions are the undecorated ones and cost nothing more
1       the name of every public function that is called, every switch of PyTorch's own attention, and whether
        its calls run here or why not
2       and the arguments: shapes, types and devices of tensors, values of what is not left at its default
3       and strides, and on a GPU the kernel that the thread launched last
======  ==================================================================================================

Values of tensors are never read. Calls inside compiled graphs are not logged.
"""

from __future__ import annotations

import functools
import inspect
import logging
import os
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor

from ._ops.library import _C, is_built

F = TypeVar("F", bound=Callable[..., Any])

LEVELS = range(4)
logger = logging.getLogger("flash_ext")


def level_from(text: str | None) -> int:
    """The level that FLASH_EXT_LOG names; none or empty is 0.

    Raises:
        ValueError: it names none.
    """
    if not text:
        return 0
    if text not in map(str, LEVELS):
        raise ValueError(f"FLASH_EXT_LOG must be 0, 1, 2 or 3, got {text!r}.")
    return int(text)


LEVEL = level_from(os.environ.get("FLASH_EXT_LOG"))

if LEVEL:
    _handler = logging.StreamHandler()
    _handler.setFormatter(logging.Formatter("%(name)s: %(message)s"))
    logger.addHandler(_handler)
    logger.setLevel(logging.INFO)
    logger.propagate = False


def _note_torch(operator: str, reason: str | None, tensors: list[Tensor]) -> None:
    """A line for a call of torch's own operators, from csrc/api/sdpa.cpp."""
    given = ", ".join(_text(tensor, LEVEL) for tensor in tensors) if LEVEL > 1 else ""
    logger.info("%s", f"aten.{operator}" + (f"({given})" if given else "")
                + (" runs here" if reason is None else f" runs as before: {reason}"))  # fmt: skip


if LEVEL and is_built:
    _C.set_sdpa_log(_note_torch)
if LEVEL == 3 and is_built:
    _C.set_switch("record_launches", 1)


def logged(function: F, level: int | None = None) -> F:
    """``function`` with a line in the log for each call; itself where the level (LEVEL if None) is 0."""
    level = LEVEL if level is None else level
    if level == 0:
        return function
    parameters = inspect.signature(function).parameters
    name = function.__qualname__

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            return function(*args, **kwargs)
        named = dict(zip(parameters, args)) | kwargs
        given = [f"{key}={_text(value, level)}" for key, value in named.items()
                 if key != "self" and not _is_default(parameters.get(key), value)]  # fmt: skip
        logger.info("%s", f"{name}({', '.join(given)})" if level > 1 else name)
        result = function(*args, **kwargs)
        if level == 3 and is_built and (launch := _C.last_launch(of_this_thread=True)) is not None:
            logger.info("%s", f"{name} launched {launch['kernel']}, grid {launch['grid']}")
        return result

    return call  # type: ignore[return-value]


def note(text: str) -> None:
    """A line about something that is not a call."""
    if LEVEL:
        logger.info("%s", text)


def _is_default(parameter: inspect.Parameter | None, value: Any) -> bool:
    return parameter is not None and not isinstance(value, Tensor) and value is parameter.default


def _text(value: Any, level: int) -> str:
    if isinstance(value, Tensor):
        dtype = str(value.dtype).removeprefix("torch.")
        strides = f", strides {tuple(value.stride())}" if level > 2 and value.layout == torch.strided else ""
        return f"{dtype} {tuple(value.shape)} on {value.device}{strides}"
    if isinstance(value, (tuple, list)):
        return "(" + ", ".join(_text(item, level) for item in value) + ")"
    return repr(value)
