"""Native kernels, for training on the CPU: C without torch's headers, so a compiler needs a second, once per machine.

The library is built at the first training step, if there is a C compiler, and kept in the user's cache folder.
Without one, or after `use_native(False)` or with SPARSEBIT_NATIVE=0, plain torch computes the same.
"""

from __future__ import annotations

import ctypes
import os
from functools import lru_cache
from pathlib import Path

from sparsebit.numeric.kernels.build import load_library

SOURCE = Path(__file__).with_name("fake_quant.c")
_wanted = os.environ.get("SPARSEBIT_NATIVE", "1") != "0"


def use_native(on: bool) -> None:
    """Switch the native kernels on or off."""
    global _wanted
    _wanted = on


def wanted() -> bool:
    return _wanted


def native() -> ctypes.CDLL | None:
    """The library of native kernels; None where plain torch has to do."""
    return _load() if _wanted else None


@lru_cache(maxsize=1)
def _load() -> ctypes.CDLL | None:
    library = load_library(SOURCE)
    if library is None:
        return None
    pointer = ctypes.c_void_p
    size = ctypes.c_int64
    threads = ctypes.c_int
    library.forward.argtypes = [pointer] * 2 + [size] * 4 + [pointer] * 3 + [threads]
    library.backward.argtypes = [pointer] * 3 + [size] * 4 + [pointer] * 4 + [threads]
    library.forward_last.argtypes = [pointer] * 2 + [size] * 3 + [pointer] * 3 + [threads]
    library.backward_last.argtypes = [pointer] * 3 + [size] * 3 + [pointer] * 4 + [threads]
    for function in (library.forward, library.backward, library.forward_last, library.backward_last):
        function.restype = None
    return library
