"""Hooks that make other libraries call :mod:`flash_ext`; each imports its library when it is used."""

from . import transformers

__all__ = ["transformers"]
