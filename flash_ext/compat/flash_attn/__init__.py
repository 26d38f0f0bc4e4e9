"""The public functions of flash-attn 2.8: same names, arguments, layouts and return values.

A program changes one import line::

    from flash_attn import flash_attn_func                  # before
    from flash_ext.compat.flash_attn import flash_attn_func  # after

The submodules ``flash_attn_interface`` (with the private pairs that ring implementations import) and
``bert_padding`` are here as well. No module called ``flash_attn`` is installed.
"""

from . import bert_padding as bert_padding
from ._kvcache import flash_attn_with_kvcache
from .flash_attn_interface import (
    flash_attn_func,
    flash_attn_kvpacked_func,
    flash_attn_qkvpacked_func,
    flash_attn_varlen_func,
    flash_attn_varlen_kvpacked_func,
    flash_attn_varlen_qkvpacked_func,
)

# The version whose interface this is; some programs look.
__version__ = "2.8.3"

__all__ = [
    "flash_attn_func",
    "flash_attn_kvpacked_func",
    "flash_attn_qkvpacked_func",
    "flash_attn_varlen_func",
    "flash_attn_varlen_kvpacked_func",
    "flash_attn_varlen_qkvpacked_func",
    "flash_attn_with_kvcache",
]


def __dir__() -> list[str]:
    modules = ["bert_padding", "flash_attn_interface"]
    return sorted([*__all__, *modules, *(name for name in globals() if name.startswith("_"))])
