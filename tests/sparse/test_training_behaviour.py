"""What a model does in training only: dropout goes on in the pruned model, a head that is lost is told."""

from __future__ import annotations

import copy
import logging
import pickle

import channel_nets
import onnx
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import sparsebit
from sparsebit.sparse import Plan, SparseModel, prune_blocks

X = torch.linspace(-1, 1, 32).reshape(4, 8)


class Drop(nn.Module):
    """The view makes the result a graph."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(8, 32), nn.Linear(32, 3)

    def forward(self, x):
        h = F.relu(self.a(x)).view(-1, 4, 8).flatten(1)
        return self.b(F.dropout(h, p=0.5, training=self.training))


def is_random(model: nn.Module) -> bool:
    return not torch.equal(model(X), model(X))


WAYS = {
    "masked": lambda m: _masked(m),
    "pruned": lambda m: sparsebit.prune(m, X, 0.5),
    "pickled": lambda m: pickle.loads(pickle.dumps(sparsebit.prune(m, X, 0.5))),
    "copied": lambda m: copy.deepcopy(sparsebit.prune(m, X, 0.5)),
    "pruned again": lambda m: sparsebit.prune(sparsebit.prune(m, X, 0.25), X, 0.25),
}


def _masked(model: nn.Module) -> SparseModel:
    smodel = SparseModel(model, {"SPARSER": {"RATIO": 0.5}}, X)
    smodel.calc_params()
    return smodel


@pytest.mark.parametrize("way", WAYS)
def test_functional_dropout_is_on_in_training(way):
    torch.manual_seed(0)
    made = WAYS[way](Drop().train())
    assert made.training and is_random(made)
    assert not is_random(made.eval()) and is_random(made.train())


def test_a_part_that_was_set_to_eval_stays_so():
    model = nn.Sequential(Drop(), nn.Linear(3, 3)).train()
    model[0].eval()
    smodel = SparseModel(model, {"SPARSER": {"RATIO": 0.5}}, X)
    assert [m.training for m in smodel.modules() if isinstance(m, nn.Dropout)] == [False]


def test_the_file_has_no_dropout(tmp_path):
    smodel = _masked(Drop().train())
    assert smodel.export_onnx(X, str(tmp_path / "m.onnx")).ok
    kinds = {node.op_type for node in onnx.load(tmp_path / "m.onnx").graph.node}
    assert "Gemm" in kinds and "Dropout" not in kinds


class Aux(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.o = nn.Linear(8, 16), nn.Linear(16, 3)
        self.aux = nn.Sequential(nn.Linear(16, 8), nn.ReLU(), nn.Linear(8, 3))

    def forward(self, x):
        h = F.relu(self.a(x))
        return (self.o(h), self.aux(h)) if self.training else self.o(h)


def test_a_head_for_training_only_is_gone_and_that_is_told(caplog, tmp_path):
    with caplog.at_level(logging.WARNING, "sparsebit"):
        small = sparsebit.prune(Aux().eval(), X, 0.5)
    assert "without aux.0, aux.2: the forward in eval mode" in caplog.text
    assert "nothing of aux.0, aux.2: the forward in eval mode" in str(small.pruning_plan)
    small.pruning_plan.save(tmp_path / "plan.json")
    assert "nothing of aux.0" in str(Plan.load(tmp_path / "plan.json"))


class Deep(Aux):
    """With residual blocks that can be merged, and replaced."""

    def __init__(self):
        super().__init__()
        self.stem = nn.Conv2d(1, 4, 1)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Conv2d(4, 4, 3, 1, 1), nn.ReLU(), nn.Conv2d(4, 4, 3, 1, 1)) for _ in range(2)
        )

    def forward(self, x):
        y = self.stem(x[:, None, None])
        for block in self.blocks:
            y = y + block(y)
        return super().forward(y.mean((1, 2)))


@pytest.mark.parametrize("way", [{"merge": 1}, {"depth": 1}])
def test_the_head_is_told_of_after_blocks_went_too(way, caplog):
    with caplog.at_level(logging.WARNING, "sparsebit"):
        small = prune_blocks(Deep().eval(), X, 0.5, batches=[X] * 4, progress=False, **way)
    assert "without aux.0, aux.2" in caplog.text and "nothing of aux.0" in str(small.pruning_plan)


def test_frozen_parts_stay_frozen():
    model = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 3)).train()
    model[1].eval()
    frozen = lambda m: [path for path, part in m.named_modules() if not part.training]
    assert frozen(sparsebit.prune(model, X, 0.5)) == frozen(model) == ["1"]
    smodel = SparseModel(model, {"SPARSER": {"RATIO": 0.5}}, X)
    smodel.calibrate([X])
    assert "1" in frozen(smodel.model) and smodel.model.get_submodule("0").training
    smodel.calc_params()
    smodel.tune_batchnorm([X])
    smodel.refit([X])
    assert frozen(smodel.compact()) == ["1"]


def test_weights_in_another_form_are_not_said_to_be_gone(caplog):
    with caplog.at_level(logging.WARNING, "sparsebit"):
        small = sparsebit.prune(nn.TransformerEncoderLayer(16, 4, 32).eval(), torch.randn(3, 2, 16), 0.5)
    assert not caplog.text and "nothing of" not in str(small.pruning_plan)


@pytest.mark.parametrize("name", ["multihead", "encoder", "encoder-decoder"])
def test_dropout_of_torchs_attention_is_on_in_training(name):
    """Nothing else in the model is random."""
    torch.manual_seed(0)
    make, data = channel_nets.ARCHITECTURES[name]
    model, x = make().eval(), data()
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        if isinstance(module, nn.MultiheadAttention):
            module.dropout = 0.5
    small = sparsebit.prune(model, x, 0.5)
    first = lambda out: out[0] if isinstance(out, tuple) else out
    assert torch.equal(first(small(x)), first(small(x)))
    small.train()
    assert not torch.equal(first(small(x)), first(small(x)))
    torch.manual_seed(0)
    smodel = SparseModel(model, {"SPARSER": {"RATIO": 0.5}}, x)
    smodel.calc_params()
    assert torch.equal(first(smodel(x)), first(smodel(x)))
    smodel.train()
    assert not torch.equal(first(smodel(x)), first(smodel(x)))
