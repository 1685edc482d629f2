"""A C file as a library: compiled at first use, once per machine, kept in the user's cache folder.

C without torch's headers, so a compiler needs a second.
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
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

log = logging.getLogger("sparsebit")

# as exact as torch: no fast-math, but nothing reads errno or floating-point traps
FLAGS = (
    "-O3",
    "-march=native",
    "-fno-math-errno",
    "-fno-trapping-math",
    "-fopenmp-simd",
    "-fPIC",
    "-std=c99",
)


def load_library(source: Path, extra: Sequence[str] = ()) -> ctypes.CDLL | None:
    """The library of `source`; None where there is no compiler, or it fails."""
    compiler = next(filter(None, map(shutil.which, (os.environ.get("CC", "cc"), "gcc", "clang"))), None)
    if compiler is None or os.name != "posix":
        return None
    gomp = _libgomp()
    try:
        file = _build(source, compiler, [*FLAGS, *extra, *(["-fopenmp"] if gomp else [])])
        if gomp:  # the one that torch runs: two pools of threads would get in each other's way
            ctypes.CDLL(gomp, mode=ctypes.RTLD_GLOBAL)
        return ctypes.CDLL(str(file))
    except (OSError, subprocess.SubprocessError) as error:
        log.debug("no native kernels: %s", error)
        return None


def _build(source: Path, compiler: str, flags: list[str]) -> Path:
    """Compile into the cache, atomically; an existing library is used."""
    key = hashlib.sha256(source.read_bytes() + repr((flags, platform.machine(), _cpu())).encode())
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "sparsebit"
    file = folder / f"{source.stem}-{key.hexdigest()[:16]}.so"
    if file.exists():
        return file
    with suppress(OSError):
        folder.mkdir(parents=True, exist_ok=True)
    if not os.access(folder, os.W_OK):  # a read-only home: once per process then
        file = Path(tempfile.mkdtemp(prefix="sparsebit-")) / file.name
    with tempfile.TemporaryDirectory(dir=file.parent) as build:
        compiled = f"{build}/kernel.o"
        linked = f"{build}/kernel.so"
        for command in (
            [*flags, "-c", str(source), "-o", compiled],
            ["-shared", compiled, "-o", linked, "-lm"],  # not linked to a libgomp: torch's is loaded already
        ):
            subprocess.run([compiler, *command], check=True, capture_output=True, timeout=120)
        os.replace(linked, file)
    return file


def _cpu() -> str:
    """The name of the CPU, which decides -march=native: a home folder may be shared by different machines."""
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
