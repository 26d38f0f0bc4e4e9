"""Other libraries' function names and signatures on top of :mod:`flash_ext`.

:mod:`flash_ext.compat.flash_attn` has the functions of the package flash-attn, version 2.8.
"""

from . import flash_attn

__all__ = ["flash_attn"]
