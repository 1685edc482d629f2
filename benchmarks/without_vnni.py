"""Make a copy of onnxruntime that sees an AVX2 CPU, to measure on a machine with AVX-512 VNNI what other machines do.

    python benchmarks/without_vnni.py build/ort_avx2
    PYTHONPATH=build/ort_avx2 python benchmarks/zoo_speed.py ...

onnxruntime asks XGETBV which registers the system saves, before it takes AVX-512 kernels. In the copy the answer is
"those of AVX": the AVX2 kernels run, at the speed of the machine. That includes the kernels that cut sums in int16. For
AVX-VNNI (256 bit) onnxruntime asks CPUID alone, leaf 7, subleaf 1. In the copy the answer is 0. The copy is for
measurements on this machine only. The installed package is not touched. The script fails if its probe finds exact sums.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

XGETBV, AND_EXTEND = b"\x0f\x01\xd0", b"\x89\xc0"  # xgetbv; mov eax, eax
AVX_ONLY = 0b111  # x87, SSE and AVX state
LEAF_7_1 = b"\xb8\x07\x00\x00\x00\xb9\x01\x00\x00\x00"  # mov eax, 7; mov ecx, 1
CPUID, NOTHING = b"\x0f\xa2", b"\x31\xc0"  # cpuid; xor eax, eax
PROBE = "from sparsebit.export.kernels.wrong_kernels import cuts_sums; print(cuts_sums())"


def patched(code: bytes) -> tuple[bytes, int]:
    """The library with both questions replaced by constants, and how many there were."""
    long = XGETBV + AND_EXTEND
    found = code.count(XGETBV) + code.count(LEAF_7_1 + CPUID)
    code = code.replace(LEAF_7_1 + CPUID, LEAF_7_1 + NOTHING)
    code = code.replace(long, b"\xb8" + AVX_ONLY.to_bytes(4, "little"))  # mov eax, 7
    code = code.replace(XGETBV, b"\xb0" + bytes([AVX_ONLY]) + b"\x90")  # mov al, 7; nop
    return code, found


def main() -> None:
    import onnxruntime

    package = Path(onnxruntime.__file__).parent
    place = Path(sys.argv[1]) if len(sys.argv) > 1 else Path("build/ort_avx2")
    target = place / "onnxruntime"
    shutil.rmtree(target, ignore_errors=True)
    shutil.copytree(package, target, ignore=shutil.ignore_patterns("__pycache__", "transformers", "tools"))
    (library,) = (target / "capi").glob("onnxruntime_pybind11_state*.so")
    code, found = patched(library.read_bytes())
    library.write_bytes(code)
    print(f"{target}: {found} questions about AVX-512 and AVX-VNNI answered with no")
    environment = {**os.environ, "PYTHONPATH": f"{place}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"}
    cut = subprocess.run([sys.executable, "-c", PROBE], env=environment, capture_output=True, text=True)
    if cut.stdout.strip() != "True":
        raise SystemExit(f"the copy still has exact sums: {cut.stdout}{cut.stderr[-300:]}")
    print("its integer sums are cut in int16, as on AVX2 without VNNI")


if __name__ == "__main__":
    main()
