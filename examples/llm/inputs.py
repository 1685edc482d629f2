"""What the scripts are given: models, checkpoints and texts. What is wrong is refused in one line, with exit code 2."""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NoReturn

import torch

from sparsebit import llm
from sparsebit.errors import ConfigError, SparsebitError
from sparsebit.llm.legacy import load_legacy

TEXT, EVAL_TEXT = "SPARSEBIT_TEXT", "SPARSEBIT_EVAL_TEXT"
FILES = ["*.json", "*.safetensors", "*.txt", "*.model", "*.jinja"]  # what is downloaded of a model


class _Help(argparse.ArgumentDefaultsHelpFormatter, argparse.RawDescriptionHelpFormatter):
    """The text of the script line by line, and the default of each option that has one."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        if action.default is None or action.default is False or action.default == "":
            return action.help
        return super()._get_help_string(action)


class Parser(argparse.ArgumentParser):
    """An argument parser whose errors are one line."""

    def __init__(self, script: str, text: str | None) -> None:
        super().__init__(prog=Path(script).name, description=text, formatter_class=_Help)

    def error(self, message: str) -> NoReturn:
        line = f"{self.prog}: error: {' '.join(message.split())}"
        print(line, file=sys.stderr)
        stop = SystemExit(line)
        stop.code = 2  # the line is printed already
        raise stop

    @contextlib.contextmanager
    def refusing(self) -> Iterator[None]:
        """What Sparsebit refuses inside is an error of the command line."""
        try:
            yield
        except SparsebitError as error:
            self.error(str(error))


def text_file(name: str) -> Path:
    """For argparse: a text file that can be read and is not empty."""
    path = Path(name)
    try:
        with path.open(encoding="utf-8") as file:
            start = file.read(1000)
    except OSError as error:
        raise argparse.ArgumentTypeError(f"{name}: cannot be read ({error.strerror})") from None
    except UnicodeDecodeError:
        raise argparse.ArgumentTypeError(f"{name}: is no text in UTF-8") from None
    if not start.strip():
        raise argparse.ArgumentTypeError(f"{name}: the file is empty, or starts with blank lines only")
    return path


def from_environment(variable: str) -> str | None:
    """The value of an environment variable; an empty one counts as not set."""
    return os.environ.get(variable) or None


def above_zero(value: str) -> int:
    """For argparse: a whole number from 1 on."""
    if not value.isdecimal() or int(value) == 0:
        raise argparse.ArgumentTypeError(f"must be a whole number above 0, got {value}")
    return int(value)


def check_packages(*packages: str, extra: str) -> None:
    lost = [name for name in packages if importlib.util.find_spec(name) is None]
    if lost:
        raise ConfigError(f"{lost[0]} is not installed; pip install 'sparsebit[{extra}]'")


def model_folder(name: str, cache: Path | None = None) -> Path:
    """The folder of a model of transformers: `name` itself, or what the Hugging Face Hub has under that name."""
    check_packages("transformers", extra="llm")
    folder = Path(name)
    if folder.is_dir():
        if not (folder / "config.json").is_file():
            raise ConfigError(f"{name}: has no config.json; name a folder that save_pretrained() wrote")
        return folder
    if folder.exists():
        raise ConfigError(f"{name}: is a file; name the folder of a model of transformers")
    if folder.is_absolute() or name.startswith(".") or name.count("/") > 1:
        raise ConfigError(f"{name}: there is no such folder; name the folder of a model of transformers")
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(name, cache_dir=cache, allow_patterns=FILES))
    except (OSError, ValueError) as error:
        reason = str(error).split("\n")[0]
        raise ConfigError(
            f"{name}: there is no such folder, and it cannot be had from the Hugging Face Hub ({reason})"
        ) from None


def tokenizer_of(folder: Path) -> Any:
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(folder)
    except (OSError, ValueError) as error:
        reason = str(error).split("\n")[0]
        raise ConfigError(f"{folder}: holds no tokenizer that can be read ({reason})") from None


def tokens_of(tokenizer: Any, text: Path) -> torch.Tensor:
    """The token ids of a whole text."""
    ids = tokenizer(text.read_text(encoding="utf-8"), verbose=False)["input_ids"]
    if len(ids) < 2:
        raise ConfigError(f"{text}: has {len(ids)} tokens; a longer text is needed")
    return torch.tensor(ids)


def encode(tokenizer: Any, prompt: str, model: Any) -> dict[str, torch.Tensor]:
    """A prompt as arguments of `model.generate`."""
    found = tokenizer(prompt, return_tensors="pt")
    if found["input_ids"].shape[1] == 0:
        raise ConfigError("the prompt has no tokens; give a longer one")
    return {key: found[key].to(model.device) for key in ("input_ids", "attention_mask")}


def window(folder: Path, length: int) -> int:
    """`length`, or the number of positions that the model has if that is less."""
    from transformers import AutoConfig

    most = getattr(AutoConfig.from_pretrained(folder), "max_position_embeddings", None) or length
    if most < length:
        print(f"the model has {most} positions: sequences are {most} tokens long")
    return min(length, most)


def check_checkpoint(checkpoint: Path) -> None:
    """A file, or a folder with a checkpoint that is complete."""
    if not checkpoint.exists():
        raise ConfigError(f"{checkpoint}: there is no such checkpoint; name a file or folder of convert.py")
    if checkpoint.is_dir() and not (checkpoint / "config.json").is_file():
        raise ConfigError(f"{checkpoint}: has no config.json; name a folder that convert.py has finished")


def load_checkpoint(checkpoint: Path, folder: Path, dtype: torch.dtype | None = None) -> Any:
    """The packed model; `folder` is that of its float model, which a checkpoint in one file does not describe."""
    check_checkpoint(checkpoint)
    if checkpoint.is_dir():
        return llm.load(checkpoint, dtype=dtype)
    return load_legacy(checkpoint, folder, dtype)


def described_by(checkpoint: Path, model_name: str | None, cache: Path | None = None) -> Path:
    """The folder with config and tokenizer of a checkpoint."""
    check_checkpoint(checkpoint)
    if model_name is not None:
        return model_folder(model_name, cache)
    if checkpoint.is_dir():
        return checkpoint
    raise ConfigError(
        f"{checkpoint}: the file holds no tokenizer; add --model_name with the model it was made from"
    )


def to_device(model: Any) -> Any:
    """On the GPU where there is one."""
    return model.to("cuda") if torch.cuda.is_available() else model
