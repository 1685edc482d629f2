"""The user's class or a graph: the class only where it computes the same inside; plans and copies keep the choice."""

from __future__ import annotations

import copy
import io
import math

import pytest
import torch
import torch.nn.functional as F
from torch import fx, nn

import sparsebit
from sparsebit.sparse import Plan, SparseModel


class Attention(nn.Module):
    """Its code takes the root of a size: with fewer dimensions in a head it would be another model."""

    def __init__(self, std: float, scale: float = 1.0):
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(32, 32) for _ in range(4))
        self.scale, self.head = nn.Parameter(torch.full((32,), scale)), nn.Linear(32, 3)
        for layer in (self.q, self.k, self.v, self.o):
            nn.init.normal_(layer.weight, std=std)

    def forward(self, x):
        b, n, _ = x.shape
        q, k, v = (layer(x).view(b, n, 4, -1).transpose(1, 2) for layer in (self.q, self.k, self.v))
        weights = (q @ k.transpose(-1, -2) / math.sqrt(q.size(-1))).softmax(-1)
        return self.head(x + self.scale * self.o((weights @ v).transpose(1, 2).reshape(b, n, -1)))


@pytest.mark.parametrize("std, scale", [(0.4, 1.0), (0.02, 1.0), (0.4, 0.0)])
def test_a_size_in_the_code_makes_a_graph_also_where_the_output_hides_it(std, scale, tmp_path):
    torch.manual_seed(0)
    x = torch.randn(2, 6, 32)
    small = sparsebit.prune(Attention(std, scale).eval(), x, 0.5, heads="dimension")
    assert type(small) is not Attention and small.q.out_features == 16
    small.pruning_plan.save(tmp_path / "plan.json")
    again = Plan.load(tmp_path / "plan.json").apply(Attention(0.02).eval())
    again.load_state_dict(small.state_dict())
    torch.testing.assert_close(again(x), small(x))


class Widths(nn.Module):
    """What the last layer reads depends on a size; its weights may hide that."""

    def __init__(self, told: bool = False):
        super().__init__()
        self.a, self.o, self.told = nn.Linear(8, 16), nn.Linear(16, 3), told
        nn.init.zeros_(self.o.weight)

    def forward(self, x):
        h = F.relu(self.a(x))
        return (self.o(h), h.shape[1]) if self.told else self.o(h / h.shape[-1] ** 0.5)


@pytest.mark.parametrize("told", [False, True])
def test_what_layers_read_and_numbers_beside_the_output_are_compared(told):
    x = torch.randn(4, 8)
    small = sparsebit.prune(Widths(told).eval(), x, 0.5)
    assert isinstance(small, fx.GraphModule) and not small.pruning_plan.as_written
    if told:
        assert small(x)[1] == 16


def test_small_outputs_are_compared_by_their_size():
    torch.manual_seed(0)

    class Shares(Attention):
        def forward(self, x):
            return super().forward(x) * 1e-6

    model, x = Shares(0.4).eval(), torch.randn(2, 6, 32)
    smodel = SparseModel(model, {"SPARSER": {"RATIO": 0.5, "HEADS": "dimension"}}, x)
    smodel.calc_params()
    small = smodel.compact()
    assert isinstance(small, fx.GraphModule)
    torch.testing.assert_close(small(x), smodel(x), rtol=1e-4, atol=1e-11)


class Plain(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(8, 16), nn.Linear(16, 3)

    def forward(self, x):
        return self.b(F.relu(self.a(x)))


def test_the_class_stays_the_class(tmp_path):
    x = torch.randn(4, 8)
    small = sparsebit.prune(Plain().eval(), x, 0.5)
    assert type(small) is Plain and small.pruning_plan.as_written
    small.pruning_plan.save(tmp_path / "plan.json")
    again = Plan.load(tmp_path / "plan.json").apply(Plain().eval())
    again.load_state_dict(small.state_dict())
    assert type(again) is Plain and torch.equal(again(x), small(x))


def reloaded(smodel):
    file = io.BytesIO()
    torch.save(smodel, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


class Recurrent(nn.Module):
    """The masked form of its first layer has a class that is made for it."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.LSTM(8, 16, 2), nn.Linear(16, 3)

    def forward(self, x):
        return self.b(self.a(x)[0])


@pytest.mark.parametrize("copied", [copy.deepcopy, reloaded])
@pytest.mark.parametrize(
    "make", [Plain, lambda: nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 3)), Recurrent]
)
def test_a_copy_of_a_sparse_model_can_do_what_the_model_can(make, copied):
    x = torch.randn(4, 8)
    smodel = SparseModel(make().eval(), {"SPARSER": {"RATIO": 0.5}}, x)
    smodel.calc_params()
    twin = copied(smodel)
    torch.testing.assert_close(twin.compact()(x), smodel(x))
    assert twin.plan == smodel.plan
    twin.calc_params(macs=0.2)
    assert twin.plan != smodel.plan
