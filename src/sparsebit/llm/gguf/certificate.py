"""The certificate of a GGUF file: llama.cpp, where it is installed, runs it, and its logits are compared."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from sparsebit.errors import ExportError
from sparsebit.llm.gguf.runner import ask_llama_cpp, has_llama_cpp
from sparsebit.llm.readers import Row

READER = "llama.cpp"
TOKENS = 16  # that are tried
FAR = 0.5  # of the logits' size; 8-bit activations stay below, two models that differ are 1.4 apart
COARSE = 1.0  # where the file rounds weights to 4 bits


def certify(path: Path, model: Any, coarse: bool = False) -> Row:
    """One row, in the form of the other readers.

    model   the model that was written.
    coarse  float weights were rounded to 4 bits for the file, so that its logits differ from the model's.
    """
    if not has_llama_cpp():
        return Row(READER, "unknown", "not run: llama-cpp-python is not installed")
    ids = (torch.arange(TOKENS) * 7 % min(model.config.vocab_size, 1000)).tolist()
    try:
        found = ask_llama_cpp(path, prompts=[ids], every=True)
    except ExportError as error:
        return Row(READER, "failed", f"failed: {error}")
    with torch.no_grad():
        ours = model(input_ids=torch.tensor([ids])).logits[0].float().cpu()
    far = gap(torch.tensor(found["logits"][0]), ours)
    if not far <= (COARSE if coarse else FAR):
        text = f"failed: its logits differ from those of the model by {far:.0%}"
        return Row(READER, "failed", text, found["version"])
    return Row(READER, "runs", f"runs, logits within {far:.2%}", found["version"])


def gap(theirs: Tensor, ours: Tensor) -> float:
    """A share of the logits' size, at the middle one of the places: a token may go to another expert."""
    if theirs.shape != ours.shape:
        return float("inf")
    apart = (theirs - ours).norm(dim=-1) / (ours - ours.mean(-1, keepdim=True)).norm(dim=-1).clamp(min=1e-30)
    return float(apart.median())
