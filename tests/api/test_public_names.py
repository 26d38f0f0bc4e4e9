"""Which names a module shows: ``__all__`` and ``dir()`` have the public ones alone."""

from __future__ import annotations

from collections.abc import Iterable
from importlib import import_module
from pkgutil import walk_packages

import pytest

import flash_ext

pytestmark = pytest.mark.everywhere


def public(names: Iterable[str]) -> set[str]:
    return {name for name in names if not any(part.startswith("_") for part in name.split("."))}


MODULES = public(found.name for found in walk_packages(flash_ext.__path__, "flash_ext.")) | {"flash_ext"}


def test_public_modules_are_found() -> None:
    assert {"flash_ext.info", "flash_ext.nn", "flash_ext.compat.flash_attn.bert_padding"} < MODULES


@pytest.mark.parametrize("name", sorted(MODULES))
def test_a_module_shows_its_own_names_alone(name: str) -> None:
    module = import_module(name)
    names, shown = {*module.__all__}, public(dir(module))
    if name == "flash_ext.compat.flash_attn":  # shows its modules, as the other library does
        names |= {m.rpartition(".")[2] for m in MODULES if m.rpartition(".")[0] == name}
    assert shown == names
    assert all(hasattr(module, own) for own in names)
