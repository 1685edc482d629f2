"""Writing an ONNX file: whole or not at all, with external data above 2 GB."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from sparsebit.errors import ExportError

LIMIT = 2**31 - 2**24  # protobuf's, with room for the graph itself


def writable(name: str | Path) -> Path:
    """The path to write to, checked before any work."""
    path = Path(name)
    if path.is_dir():
        raise ExportError(f"{path}: is a folder; give the name of a file, such as model.onnx")
    folder = path.parent
    if not folder.is_dir():
        raise ExportError(f"{path}: the folder {folder} does not exist")
    if not os.access(folder, os.W_OK) or (path.exists() and not os.access(path, os.W_OK)):
        raise ExportError(f"{path}: cannot be written; check its permissions")
    return path


def read(path: Path, load: Callable[[Path], Any]) -> Any:
    """Read an ONNX file with `load`."""
    from google.protobuf.message import DecodeError

    if not path.is_file():
        raise ExportError(f"{path}: there is no such file")
    try:
        return load(path)
    except DecodeError as error:
        raise ExportError(f"{path}: is not an ONNX file, or only a part of one: {error}") from error


def report_of(path: Path) -> Path:
    """The path of the report of a file: m.report.json for m.onnx; another ending is part of the name."""
    return path.with_name(f"{path.name.removesuffix('.onnx')}.report.json")


@contextmanager
def drafting(path: Path) -> Iterator[Path]:
    """A place for a draft, under the file's own name; gone afterwards, also after an error or an interrupt."""
    folder = tempfile.mkdtemp(prefix=f".{path.name}.", dir=path.parent)
    try:
        yield Path(folder) / path.name
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def write(model: Any, draft: Path) -> None:
    """Write an onnx_ir model; above 2 GB the numbers go into <name>.data beside it."""
    import onnx_ir as ir

    size = sum(v.const_value.nbytes for v in model.graph.initializers.values() if v.const_value is not None)
    ir.save(model, draft, external_data=f"{draft.name}.data" if size > LIMIT else None)
    with editing(draft) as written:
        del written.graph.value_info[:]  # types and shapes: runtimes infer them


def add_metadata(draft: Path, key: str, value: str) -> None:
    with editing(draft) as written:
        written.metadata_props.add(key=key, value=value)


@contextmanager
def editing(path: Path) -> Iterator[Any]:
    """The graph of a written file; external data stays where it is."""
    import onnx

    model = onnx.load(str(path), load_external_data=False)
    yield model
    onnx.save(model, str(path))


def size_of(path: Path) -> int:
    """Bytes on disk, with external data."""
    data = path.with_name(f"{path.name}.data")
    return path.stat().st_size + (data.stat().st_size if data.exists() else 0)


def accept(draft: Path, path: Path) -> None:
    """Move a draft to its place: whole or not at all."""
    data = draft.with_name(f"{draft.name}.data")
    if data.exists():
        os.replace(data, path.with_name(f"{path.name}.data"))
    os.replace(draft, path)


def set_apart(draft: Path, path: Path) -> Path:
    """A file that failed is kept under another name, beside the one it was meant to be."""
    failed = path.with_name(f"{path.stem}.failed{path.suffix}")
    data = draft.with_name(f"{draft.name}.data")
    if data.exists():
        with editing(draft) as model:
            for entry in (e for tensor in model.graph.initializer for e in tensor.external_data):
                if entry.key == "location":
                    entry.value = f"{failed.name}.data"
        os.replace(data, failed.with_name(f"{failed.name}.data"))
    os.replace(draft, failed)
    return failed
