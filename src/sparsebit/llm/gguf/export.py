"""llm.export_gguf: a model or its folder as one GGUF file that llama.cpp runs.

Everything that can be refused is refused before the weights are read, and the file takes its name when it is whole.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from torch import nn

from sparsebit.errors import ExportError, ReaderError
from sparsebit.llm.gguf.architectures import TABLE, Architecture, architecture_of
from sparsebit.llm.gguf.certificate import certify
from sparsebit.llm.gguf.items import Item, items_of
from sparsebit.llm.gguf.packing import EXACT
from sparsebit.llm.gguf.rope import rope_tensors
from sparsebit.llm.gguf.source import Source, open_model
from sparsebit.llm.gguf.storing import KINDS, Stored, plan
from sparsebit.llm.gguf.vocabulary import Vocabulary, open_tokenizer, read_vocabulary, without_tokens
from sparsebit.llm.readers import Row
from sparsebit.utils.files import whole_path

ARCHITECTURES = {kind: known.name for kind, known in TABLE.items()}  # model_type -> llama.cpp's name
FILE_TYPES = {"F32": 0, "F16": 1, "Q4_0": 2, "Q4_1": 3, "Q8_0": 7, "BF16": 32}
PHI3_TOKENS = {"</s>", "<unk>", "<s>", "<|endoftext|>"}  # llama.cpp looks for them in a model named Phi-3


@dataclass(frozen=True)
class GgufReport:
    """The written file. `changed`: layers whose solved codes were not kept, and why. `notes`: differences at run
    time."""

    path: Path
    architecture: str
    tokenizer: str
    bytes: int
    tensors: dict[str, int]  # kind -> how many
    kept: int  # solved layers whose codes are in the file unchanged
    changed: dict[str, str] = field(default_factory=dict, repr=False)
    notes: list[str] = field(default_factory=list, repr=False)
    reader: Row | None = None  # whether llama.cpp runs it

    def as_dict(self) -> dict[str, Any]:
        reader = self.reader.facts() if self.reader else None
        return {**vars(self), "path": str(self.path), "reader": reader}

    def __str__(self) -> str:
        kinds = ", ".join(f"{count} {kind}" for kind, count in self.tensors.items())
        lines = [
            f"{self.path}: {self.architecture}, {self.bytes / 1e6:.1f} MB, tensors: {kinds}",
            f"tokenizer    {self.tokenizer}",
        ]
        if self.kept or self.changed:
            lines.append(f"codes        {self.kept} layers as they were solved, {len(self.changed)} changed")
        shown = list(self.changed.items())[:3]
        lines += [f"  {name}: {why}" for name, why in shown]
        if len(self.changed) > 3:
            lines.append(f"  and {len(self.changed) - 3} more")
        lines += [f"note         {note}" for note in self.notes]
        return "\n".join([*lines, str(self.reader)] if self.reader else lines)


def export_gguf(
    model: nn.Module | str | Path,
    path: str | Path,
    tokenizer: Any = None,
    *,
    outtype: str = "auto",
    name: str | None = None,
    pre: str | None = None,
    overwrite: bool = False,
) -> GgufReport:
    """Writes a model of transformers, its float folder, or a folder of `llm.quantize` as a GGUF file.

    Where llama-cpp-python is installed, llama.cpp then runs the file; a ReaderError reports different logits.

    tokenizer   a folder, or a tokenizer of transformers; None: that of the model's folder; False: none.
    outtype     of float matrices: auto (bfloat16 stays, else float16), f32, f16, bf16, q8_0, q4_0 or q4_1. Packed
                layers keep their codes where a block of GGUF holds them.
    name        the name of the model in the file; None: the name of the folder.
    pre         llama.cpp's name for the way the tokenizer cuts text, where it is not recognised.
    """
    gguf = package()
    path = Path(path)
    _check_path(path, overwrite)
    if outtype not in KINDS:
        raise ExportError(f"outtype: must be one of {', '.join(KINDS)}, got {outtype!r}")
    source = open_model(model)
    architecture = architecture_of(source.config)
    notes = architecture.notes(source.config)
    vocabulary = _vocabulary(source, tokenizer, pre)
    whole = source.model()
    items = list(_items(gguf, source.config, whole, architecture))
    stored = [plan(file_name, item, outtype) for file_name, item in items]
    keys = _general(source, name, stored, vocabulary)
    keys |= architecture.metadata(source.config) | vocabulary.metadata() | source.ends(vocabulary.keys)
    keys[f"{architecture.name}.vocab_size"] = vocabulary.size
    with whole_path(path) as temporary:
        _write(gguf, temporary, architecture.name, keys, stored)
    packed = [entry for entry in stored if entry.packed]
    coarse = any(entry.kind.startswith("Q4") and not entry.packed for entry in stored)
    kinds: dict[str, int] = {}
    for entry in stored:
        kinds[entry.kind] = kinds.get(entry.kind, 0) + 1
    report = GgufReport(
        path=path,
        architecture=architecture.name,
        tokenizer=str(vocabulary),
        bytes=path.stat().st_size,
        tensors=kinds,
        kept=sum(entry.change == EXACT for entry in packed),
        changed={e.name: f"{e.kind}, {e.change}: {e.why}" for e in stored if e.change != EXACT},
        notes=notes + vocabulary.notes,
        reader=certify(path, whole, coarse),
    )
    if report.reader and report.reader.state == "failed":
        raise ReaderError(
            f"{path}: {report.reader}. The file is kept; please report the model's name", report
        )
    return report


def to_gguf(model: Any, path: str | Path, tokenizer: Any = None) -> GgufReport:
    """`export_gguf` under its first name."""
    return export_gguf(model, path, tokenizer)


def package() -> Any:
    """The package gguf, which knows the names of tensors and writes the file."""
    try:
        import gguf
    except ImportError:
        raise ExportError("gguf is not installed: pip install gguf") from None
    return gguf


def _check_path(path: Path, overwrite: bool) -> None:
    if path.is_dir():
        raise ExportError(f"{path}: is a folder; name a file, such as {path / 'model.gguf'}")
    if path.exists() and not overwrite:
        raise ExportError(f"{path}: already exists; name another file, or pass overwrite=True (--overwrite)")
    if not path.absolute().parent.is_dir():
        raise ExportError(f"{path}: its folder does not exist; make it first")
    if not os.access(path.absolute().parent, os.W_OK):
        raise ExportError(f"{path}: its folder cannot be written to")


def _vocabulary(source: Source, tokenizer: Any, pre: str | None) -> Vocabulary:
    rows = source.config.vocab_size
    if tokenizer is False or (tokenizer is None and source.folder is None):
        return without_tokens(rows)
    where = source.folder if tokenizer is None else tokenizer
    return read_vocabulary(open_tokenizer(where), rows, pre)


def _items(
    gguf: Any, config: Any, model: nn.Module, architecture: Architecture
) -> Iterator[tuple[str, Item]]:
    """Every tensor of the model under its name in the file."""
    arch = next(a for a, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture.name)
    names = gguf.get_tensor_name_map(arch, config.num_hidden_layers)
    embeddings: Item | None = None
    head = False
    for old, item in items_of(model):
        for new, value in architecture.rewrite(old, item, config):
            found = names.get_name(new, try_suffixes=(".weight", ".bias"))
            if found is None:
                raise ExportError(
                    f"gguf: llama.cpp's {architecture.name} has no tensor for {old!r} of shape {item.shape}; this "
                    "variant of the model cannot be written"
                )
            if found == "token_embd.weight":
                embeddings = value
            head = head or found == "output.weight"
            yield str(found), value
    if architecture.own_head and not head and embeddings is not None:
        yield "output.weight", embeddings
    yield from rope_tensors(config, architecture.name)


def _general(
    source: Source, name: str | None, stored: list[Stored], vocabulary: Vocabulary
) -> dict[str, Any]:
    name = name or source.name
    texts = set(vocabulary.keys.get("tokenizer.ggml.tokens", ()))
    if any(word in name.lower() for word in ("phi-3", "phi3")) and not texts >= PHI3_TOKENS:
        name = name.lower().replace("phi-3", "phi 3").replace("phi3", "phi 3")
    weights: dict[str, int] = {}
    for entry in stored:
        weights[entry.kind] = weights.get(entry.kind, 0) + int(np.prod(entry.shape))
    most = max(weights, key=lambda kind: weights[kind])
    return {
        "general.type": "model",
        "general.name": name,
        "general.file_type": FILE_TYPES[most],
        "general.quantization_version": 2,
    }


def _write(gguf: Any, path: Path, arch: str, keys: dict[str, Any], stored: list[Stored]) -> None:
    writer = gguf.GGUFWriter(str(path), arch)
    for entry in stored:
        kind = gguf.GGMLQuantizationType[entry.kind]
        run, size = gguf.GGML_QUANT_SIZES[kind]
        count = int(np.prod(entry.shape)) // run * size
        writer.add_tensor_info(entry.name, entry.shape, np.dtype(np.float32), count, raw_dtype=kind)
    total, shared, expert, experts = writer.get_total_parameter_count()
    writer.add_size_label(gguf.size_label(total, shared, expert, experts))
    for key, value in keys.items():
        _add(gguf, writer, key, value)
    try:
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        for entry in stored:
            writer.write_tensor_data(entry.data(gguf))
    finally:
        writer.close()


def _add(gguf: Any, writer: Any, key: str, value: Any) -> None:
    kinds = gguf.GGUFValueType
    if isinstance(value, bytes):
        writer.add_key_value(key, value, kinds.ARRAY, sub_type=kinds.UINT8)
    elif isinstance(value, list):
        writer.add_array(key, value)
    else:
        kind = {bool: kinds.BOOL, int: kinds.UINT32, float: kinds.FLOAT32, str: kinds.STRING}[type(value)]
        writer.add_key_value(key, value, kind)
