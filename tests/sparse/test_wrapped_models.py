"""Models inside torch.compile, DataParallel: the model is taken out, pruned and quantized as it is."""

from __future__ import annotations

import logging

import pytest
import torch
from torch import nn

import sparsebit
from sparsebit.sparse import SparseModel, shorten

X = torch.randn(8, 3, 8, 8)
WRAPPED = {
    "compiled": torch.compile,
    "parallel": nn.DataParallel,
    "both": lambda m: torch.compile(nn.DataParallel(m)),
}


class Net(nn.Sequential):
    def __init__(self):
        super().__init__(nn.Conv2d(3, 16, 3), nn.ReLU(), nn.Conv2d(16, 4, 3))


@pytest.mark.parametrize("way", WRAPPED)
def test_the_model_inside_is_pruned(way, caplog):
    torch.manual_seed(0)
    model = Net().eval()
    with caplog.at_level(logging.INFO, "sparsebit"):
        small = sparsebit.prune(WRAPPED[way](model), X, 0.5)
    assert "Net: taken out of its" in caplog.text
    assert type(small) is Net and small[0].out_channels == 8
    again = small.pruning_plan.apply(WRAPPED[way](model))
    assert type(again) is Net and torch.equal(again(X), small(X))
    smodel = SparseModel(WRAPPED[way](model), {"SPARSER": {"RATIO": 0.5}}, X)
    smodel.calc_params()
    assert type(smodel.compact()) is Net
    assert isinstance(shorten(WRAPPED[way](model), X, []), nn.Module)


@pytest.mark.parametrize("way", WRAPPED)
def test_the_model_inside_is_quantized(way):
    model = Net().eval()
    quantized = sparsebit.QuantModel(WRAPPED[way](model), {"BACKEND": "virtual"}, example=X)
    assert not quantized.model.meta["islands"]
    assert len(list(quantized.named_quantizers())) == len(
        list(sparsebit.QuantModel(model, {"BACKEND": "virtual"}).named_quantizers())
    )
    torch.testing.assert_close(quantized(X), model(X))
