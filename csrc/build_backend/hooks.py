"""PEP 517 build backend: setuptools, plus what an isolated build of a torch extension needs to know.

Isolation normally hides the torch that is installed, and a build against another torch does not load. Under
pip the build still runs on the target's interpreter, so its torch can be found and built against
(environment.py); only what is missing is fetched.
"""

from __future__ import annotations

from typing import Any

from setuptools import build_meta
from setuptools.build_meta import (  # noqa: F401  (hooks that need nothing of ours)
    build_editable,
    build_sdist,
    build_wheel,
    get_requires_for_build_sdist,
    prepare_metadata_for_build_editable,
    prepare_metadata_for_build_wheel,
)

from . import archs
from .environment import BuildProblem, missing_requirements


def get_requires_for_build_wheel(config_settings: dict[str, Any] | None = None) -> list[str]:
    return _missing() + build_meta.get_requires_for_build_wheel(config_settings)


def get_requires_for_build_editable(config_settings: dict[str, Any] | None = None) -> list[str]:
    return _missing() + build_meta.get_requires_for_build_editable(config_settings)


def _missing() -> list[str]:
    """Asked before setuptools says anything, so that a refusal stands alone."""
    try:
        archs.chosen()  # a word that means nothing is said before anything is fetched for it
        return missing_requirements()
    except BuildProblem as problem:
        raise SystemExit(f"\n{problem}") from None  # the message alone, no traceback around it
