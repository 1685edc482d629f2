"""Language models by their folder, and text as tokens: what the llm commands work on."""

from __future__ import annotations

import importlib.util
import sys
import zipfile
from pathlib import Path
from typing import Any

from sparsebit.cli.inputs.models import optional
from sparsebit.cli.inputs.objects import call
from sparsebit.cli.terminal.output import InputError, one_line

FORMS = "a .txt file, an .npy file of tokens, or an .npz file of a processor's batch (or a folder of them)"
# their text holds more than the document
TABLES = {".arrow", ".csv", ".json", ".jsonl", ".parquet", ".tsv"}
USUAL_LENGTH = 512


def model_folder(spec: str) -> Path:
    """`DIR` or `hf:DIR`: a model as transformers saves it."""
    folder = Path(spec.removeprefix("hf:"))
    if not (folder / "config.json").is_file():
        way = "download the model first"
        if (folder / "adapter_config.json").is_file():
            way = "it holds an adapter of PEFT; merge it into its model, and save that with save_pretrained()"
        if folder.is_file():
            way = "give the folder of transformers, with config.json and safetensors, that the file was made from"
        raise InputError(f"{spec}: is not a folder with a config.json; {way}")
    if importlib.util.find_spec("transformers") is None:
        raise InputError(
            "language models need the package transformers: pip install 'sparsebit[llm]'; or use "
            "sparsebit.llm.quantize from Python, which takes any nn.Module"
        )
    from sparsebit.llm.models.skeleton import check_model_type, check_transformers, read_config

    check_transformers()
    check_model_type(folder, read_config(folder))
    return folder


def load_model(folder: Path) -> Any:
    """A quantized checkpoint or a float one, in eval mode."""
    from sparsebit import llm
    from sparsebit.llm.models.skeleton import class_of, read_config

    config = read_config(folder)
    if config.get("quantization_config"):
        return llm.load(folder)
    transformers = optional("transformers", str(folder))
    if not sys.stderr.isatty():
        transformers.utils.logging.disable_progress_bar()
    settings = call(str(folder), lambda: transformers.AutoConfig.from_pretrained(folder))
    build = class_of(config.get("architectures") or [], settings, folder).from_pretrained
    where = {"local_files_only": True, "use_safetensors": True, "output_loading_info": True}
    told = transformers.utils.logging.get_verbosity()
    transformers.utils.logging.set_verbosity_error()  # it would list missing tensors on many lines
    try:
        model, info = call(str(folder), lambda: build(folder, **where))
    finally:
        transformers.utils.logging.set_verbosity(told)
    if info["missing_keys"]:
        missing = sorted(info["missing_keys"])
        raise InputError(
            f"{folder}: {len(missing)} tensors of the model are not in its files, such as {missing[0]}; "
            "they would be random numbers"
        )
    return model.eval()


def load_tokenizer(folder: Path) -> Any:
    tokenizers = optional("transformers", str(folder)).AutoTokenizer
    if not any(folder.glob("*token*")) and not any(folder.glob("vocab*")) and not any(folder.glob("*.model")):
        raise InputError(
            f"{folder}: holds no tokenizer, which a text needs; copy tokenizer.json and tokenizer_config.json of the "
            "model into it, or give tokens as an .npy file"
        )
    return call(f"{folder}: its tokenizer", lambda: tokenizers.from_pretrained(folder, local_files_only=True))


def read_tokens(spec: str, folder: Path) -> Any:
    """(n,) of a text, by the tokenizer of the model's own folder; a .npy file is read without a tokenizer, (n,) or
    (count, n)."""
    path = Path(spec)
    if path.is_dir():
        raise InputError(f"{spec}: is a folder without .npz files; --data takes {FORMS}")
    if not path.is_file():
        raise InputError(f"{spec}: no such file; --data takes {FORMS}")
    if path.suffix in TABLES:
        raise InputError(f"{spec}: is not plain text; write the texts of its rows into one .txt file")
    if path.suffix == ".npy":
        return _of_array(path)
    import torch

    try:
        text = path.read_text("utf-8")
    except UnicodeDecodeError:
        raise InputError(f"{spec}: not a text file in UTF-8; --data takes {FORMS}") from None
    tokenizer = load_tokenizer(folder)
    found = call(str(path), lambda: tokenizer(text, add_special_tokens=False, verbose=False))["input_ids"]
    if len(found) < 2:
        raise InputError(f"{spec}: has {len(found)} tokens; a few thousand are a good start")
    return torch.tensor(found)


def _of_array(path: Path) -> Any:
    import numpy as np
    import torch

    try:
        array = np.load(path, allow_pickle=False)
    except (ValueError, OSError, EOFError) as error:
        raise InputError(f"{path}: cannot be read: {one_line(error)}") from None
    if array.dtype.kind not in "iu" or array.ndim not in (1, 2) or array.shape[-1] < 2 or not array.size:
        shape = "x".join(map(str, array.shape)) or "()"
        raise InputError(
            f"{path}: holds {array.dtype} of shape {shape}; tokens are whole numbers, (n,) or (count, n)"
        )
    return torch.from_numpy(array.astype(np.int64))


def check_tokens(spec: str, tokens: Any, config: Any, length: int | None) -> int:
    """How long sequences are. Tokens of another tokenizer, and too long sequences, would stop the model inside."""
    from sparsebit.llm.walk.data import positions_of

    size = getattr(config.get_text_config(), "vocab_size", None)
    if size is not None and (int(tokens.max()) >= size or int(tokens.min()) < 0):
        raise InputError(
            f"{spec}: has the token {int(tokens.max())}, but the model knows {size}: made with another tokenizer?"
        )
    most = positions_of(config)
    if most is not None and length is not None and length > most:
        raise InputError(f"--length {length}: the model was made for {most} tokens; give {most} or less")
    if most is not None and tokens.dim() == 2 and tokens.shape[1] > most:
        raise InputError(f"{spec}: has sequences of {tokens.shape[1]} tokens; the model was made for {most}")
    return length or min(USUAL_LENGTH, most or USUAL_LENGTH)


def is_batches(spec: str) -> bool:
    """True if `--data` names batches of a processor, not tokens."""
    path = Path(spec)
    return path.suffix == ".npz" or (path.is_dir() and any(path.glob("*.npz")))


def read_batches(spec: str, samples: int) -> list[Any]:
    """One dict of tensors per .npz file, by the names of the model's arguments."""
    import numpy as np
    import torch

    path = Path(spec)
    found = []
    for file in sorted(path.glob("*.npz"))[:samples] if path.is_dir() else [path]:
        try:
            with np.load(file, allow_pickle=False) as arrays:
                found.append({name: torch.from_numpy(_wide(arrays[name])) for name in arrays.files})
        except (ValueError, OSError, EOFError, TypeError, zipfile.BadZipFile) as error:
            raise InputError(f"{file}: cannot be read: {one_line(error)}") from None
    return found


def _wide(array: Any) -> Any:
    """Whole numbers as int64: layers that look tokens up take no others."""
    return array.astype("int64") if array.dtype.kind in "iu" else array


def in_halves(batches: list[Any]) -> list[Any]:
    """For an encoder-decoder: it reads the first half of each sequence and writes the second."""
    middle = batches[0].shape[1] // 2
    halves = (batch.tensor_split([middle], dim=1) for batch in batches)
    return [{"input_ids": a.contiguous(), "labels": b.contiguous()} for a, b in halves]


def windows(tokens: Any, length: int, samples: int) -> list[Any]:
    """At most `samples` sequences of `length` tokens, evenly spaced over a text, four to a batch."""
    import torch

    if tokens.dim() == 2:
        return list(tokens[:samples].split(4))
    rows = list(tokens.split(min(length, len(tokens))))
    rows = [row for row in rows if len(row) == len(rows[0])]
    step = max(len(rows) / samples, 1)
    chosen = [rows[int(i * step)] for i in range(min(samples, len(rows)))]
    return list(torch.stack(chosen).split(4))
