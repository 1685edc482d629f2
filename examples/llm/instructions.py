"""Training texts: alpaca's JSON (instruction, input, output), or a plain text file cut into pieces."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor


def texts(path: Path) -> list[str]:
    if path.suffix != ".json":
        return [part for part in path.read_text(encoding="utf-8").split("\n\n") if part.strip()]
    found = []
    for row in json.loads(path.read_text(encoding="utf-8")):
        parts = {"Instruction": row["instruction"], "Input": row.get("input", ""), "Response": row["output"]}
        found.append("\n\n".join(f"### {name}:\n{text}" for name, text in parts.items() if text))
    return found


def sequences(tokenizer: Any, path: Path, length: int) -> list[Tensor]:
    """Token ids of each text, cut at `length`; texts of a single token have nothing to predict."""
    end = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    rows = [torch.tensor([*tokenizer(text)["input_ids"], *end][:length]) for text in texts(path)]
    return [row for row in rows if len(row) > 1]


def batch(rows: list[Tensor], length: int | None = None) -> dict[str, Tensor]:
    """One batch, padded to its longest row or to `length`; what is padded is no label."""
    length = length or max(len(row) for row in rows)
    ids, labels = torch.zeros(len(rows), length, dtype=torch.long), torch.full((len(rows), length), -100)
    for i, row in enumerate(rows):
        ids[i, : len(row)] = labels[i, : len(row)] = row
    return {"input_ids": ids, "labels": labels, "attention_mask": (labels != -100).long()}
