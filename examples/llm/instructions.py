"""Training texts: alpaca's JSON (instruction, input, output), or a plain text file cut into pieces at blank lines."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from sparsebit.errors import ConfigError


def prompt(instruction: str, given: str = "") -> str:
    """An instruction as the model reads it, in training and in generate.py; the answer follows."""
    parts = {"Instruction": instruction, "Input": given, "Response": ""}
    return "\n\n".join(f"### {name}:\n{text}" for name, text in parts.items() if text or name == "Response")


def texts(path: Path) -> list[str]:
    content = path.read_text(encoding="utf-8")
    if path.suffix != ".json":
        return [part for part in content.split("\n\n") if part.strip()]
    try:
        rows = json.loads(content)
        return [prompt(row["instruction"], row.get("input", "")) + row["output"] for row in rows]
    except (ValueError, TypeError, KeyError, AttributeError):
        raise ConfigError(
            f"{path}: must be a JSON list of objects with the texts 'instruction' and 'output', and maybe 'input'"
        ) from None


def sequences(tokenizer: Any, path: Path, length: int) -> list[Tensor]:
    """Token ids of each text, cut at `length`; texts of a single token have nothing to predict."""
    end = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    rows = [torch.tensor([*tokenizer(text)["input_ids"], *end][:length]) for text in texts(path)]
    found = [row for row in rows if len(row) > 1]
    if not found:
        raise ConfigError(f"{path}: no text in it has two tokens; there is nothing to learn from")
    return found


def batch(rows: list[Tensor], length: int | None = None) -> dict[str, Tensor]:
    """One batch, padded to its longest row or to `length`; what is padded is no label."""
    length = length or max(len(row) for row in rows)
    ids, labels = torch.zeros(len(rows), length, dtype=torch.long), torch.full((len(rows), length), -100)
    for i, row in enumerate(rows):
        ids[i, : len(row)] = labels[i, : len(row)] = row
    return {"input_ids": ids, "labels": labels, "attention_mask": (labels != -100).long()}
