"""MiniLM (transformers BERT, real weights) on STS-B dev: W8A8 keeps Spearman's rank correlation within 0.01."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import sparsebit
from minilm import batches, by_length, minilm, missing, pairs, pooled, ranks, spearman

FLOAT = 0.8672  # measured, shared/assets/README.md

pytestmark = [
    pytest.mark.assets,
    pytest.mark.slow,
    pytest.mark.skipif(bool(missing()), reason=missing()),
]


@pytest.fixture(scope="module")
def loaded() -> tuple[nn.Module, Any]:
    return minilm()


@torch.no_grad()
def embed(model: nn.Module, tokenizer: Any, sentences: list[str]) -> Tensor:
    order = by_length(sentences)
    parts = batches(tokenizer, [sentences[i] for i in order])
    found = [pooled(model(**part).last_hidden_state, part["attention_mask"]) for part in parts]
    return torch.cat(found)[torch.tensor(order).argsort()]


def correlation(model: nn.Module, tokenizer: Any) -> float:
    first, second, scores = pairs("dev")
    found = embed(model, tokenizer, first + second)
    return spearman(torch.cosine_similarity(found[: len(first)], found[len(first) :]), scores)


def test_spearman_of_ties() -> None:
    assert ranks(torch.tensor([3.0, 1.0, 3.0, 2.0])).tolist() == [3.5, 1.0, 3.5, 2.0]
    assert spearman(torch.tensor([1.0, 2.0, 3.0]), torch.tensor([1.0, 10.0, 5.0])) == pytest.approx(0.5)


def test_float(loaded: tuple[nn.Module, Any]) -> None:
    assert correlation(*loaded) == pytest.approx(FLOAT, abs=5e-4)


@pytest.mark.parametrize("trace", ["fx", "export"])
def test_w8a8_keeps_spearman(loaded: tuple[nn.Module, Any], trace: str, record_property: Any) -> None:
    model, tokenizer = loaded
    calibration = batches(tokenizer, pairs("test")[0][:128])
    qmodel = sparsebit.QuantModel(model, "w8a8", example=calibration[0], trace=trace).calibrate(calibration)
    qmodel.set_quant(w_quant=True, a_quant=True)
    quantized = correlation(qmodel, tokenizer)
    record_property("spearman", quantized)
    assert quantized == pytest.approx(FLOAT, abs=0.01)
