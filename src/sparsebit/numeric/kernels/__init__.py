"""Native kernels, for training on the CPU: C without torch's headers, so a compiler needs a second, once per machine.

The library is built at the first training step, if there is a C compiler, and kept in the user's cache folder.
Without one, or after `use_native(False)` or with SPARSEBIT_NATIVE=0, plain torch computes the same.
"""

from __future__ import annotations

import ctypes
import hashlib
import logging
import os
import platform
import shutil
import subprocess
import tempfile
from contextlib import suppress
from functools import lru_cache
from pathlib import Path

log = logging.getLogger("sparsebit")

SOURCE = Path(__file__).with_name("fake_quant.c")
# as exact as torch: no fast-math, but nothing reads errno or floating-point traps
FLAGS = [
    "-O3",
    "-march=native",
    "-fno-math-errno",
    "-fno-trapping-math",
    "-fopenmp-simd",
    "-fPIC",
    "-std=c99",
]
_wanted = os.environ.get("SPARSEBIT_NATIVE", "1") != "0"


def use_native(on: bool) -> None:
    """Switch the native kernels on or off."""
    global _wanted
    _wanted = on


def native() -> ctypes.CDLL | None:
    """The library of native kernels; None where plain torch has to do."""
    return _load() if _wanted else None


@lru_cache(maxsize=1)
def _load() -> ctypes.CDLL | None:
    compiler = next(filter(None, map(shutil.which, (os.environ.get("CC", "cc"), "gcc", "clang"))), None)
    if compiler is None or os.name != "posix":
        return None
    gomp = _libgomp()
    try:
        file = _build(compiler, [*FLAGS, *(["-fopenmp"] if gomp else [])])
        if gomp:  # the one that torch runs: two pools of threads would get in each other's way
            ctypes.CDLL(gomp, mode=ctypes.RTLD_GLOBAL)
        library = ctypes.CDLL(str(file))
    except (OSError, subprocess.SubprocessError) as error:
        log.debug("no native kernels: %s", error)
        return None
    pointer, size, threads = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int
    library.forward.argtypes = [pointer] * 2 + [size] * 4 + [pointer] * 3 + [threads]
    library.backward.argtypes = [pointer] * 3 + [size] * 4 + [pointer] * 4 + [threads]
    library.forward_last.argtypes = [pointer] * 2 + [size] * 3 + [pointer] * 3 + [threads]
    library.backward_last.argtypes = [pointer] * 3 + [size] * 3 + [pointer] * 4 + [threads]
    for function in (library.forward, library.backward, library.forward_last, library.backward_last):
        function.restype = None
    return library


def _build(compiler: str, flags: list[str]) -> Path:
    """Compile into the cache, atomically; a library that is there already is used as it is."""
    key = hashlib.sha256(SOURCE.read_bytes() + repr((flags, platform.machine(), _cpu())).encode())
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "sparsebit"
    file = folder / f"fake_quant-{key.hexdigest()[:16]}.so"
    if file.exists():
        return file
    with suppress(OSError):
        folder.mkdir(parents=True, exist_ok=True)
    if not os.access(folder, os.W_OK):  # a read-only home: once per process then
        file = Path(tempfile.mkdtemp(prefix="sparsebit-")) / file.name
    with tempfile.TemporaryDirectory(dir=file.parent) as build:
        compiled, linked = f"{build}/kernel.o", f"{build}/kernel.so"
        for command in (
            [*flags, "-c", str(SOURCE), "-o", compiled],
            ["-shared", compiled, "-o", linked, "-lm"],  # not linked to a libgomp: torch's is loaded already
        ):
            subprocess.run([compiler, *command], check=True, capture_output=True, timeout=120)
        os.replace(linked, file)
    return file


def _cpu() -> str:
    """What -march=native looks at: a home folder may be shared by different machines."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line for line in lines if line.startswith(("flags", "Features"))), platform.processor())


def _libgomp() -> str | None:
    """The OpenMP library that torch has loaded."""
    try:
        maps = Path("/proc/self/maps").read_text().splitlines()
    except OSError:
        return None
    return next((path for path in (line.split()[-1] for line in maps) if "libgomp" in path), None)
