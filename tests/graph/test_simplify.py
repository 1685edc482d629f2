"""Simplifiers: what changes, what must stay, and that the output is the same."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import fx, nn

from sparsebit.graph import run_passes
from sparsebit.graph.ops import writes_input
from sparsebit.graph.simplify import SIMPLIFIERS


def simplified(model, *args):
    """The simplified graph and the names of its calls; outputs are compared with the plain model."""
    gm = fx.symbolic_trace(model)
    run_passes(gm, SIMPLIFIERS, check=args)
    want, got = model(*args), gm(*args)
    torch.testing.assert_close(got, want, rtol=0, atol=0)
    return gm, [getattr(n.target, "__name__", n.target) for n in gm.graph.nodes if n.op.startswith("call")]


X = torch.randn(2, 3, 4, 5)


def test_identity_goes_unless_it_must_stay():
    class Kept(nn.Identity):
        def forward(self, x):
            return x + 1

    Kept.__module__ = "torch.nn.mine"  # a leaf for fx
    net = nn.Sequential(nn.Identity(), nn.Identity(), nn.ReLU(), nn.Identity(), Kept(), nn.Dropout()).eval()
    net[3].remove = False
    assert simplified(net, X)[1] == ["2", "3", "4", "5"]


def test_identity_called_with_a_keyword_or_a_list():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Identity(), nn.Identity()

        def forward(self, x):
            return torch.cat(self.b([self.a(input=x)]))

    assert simplified(Net(), X)[1] == ["b", "cat"]


def test_a_model_of_identities_only():
    assert simplified(nn.Sequential(nn.Identity(), nn.Identity()), X)[1] == []


@pytest.mark.parametrize(
    "forward, calls",
    [
        (lambda x: x.view(x.shape[0], x.shape[-1], -1), ["size", "size", "view"]),
        (lambda x: x.new_ones(x.shape), ["size", "new_ones"]),
        (lambda x: x.new_ones(x.shape[1:]), ["size", "getitem", "new_ones"]),
        (lambda x: x.new_ones(x.shape[-3:-1]) + x.shape[1], ["size", "getitem", "new_ones", "size", "add"]),
        (lambda x: x.reshape(x.size()[0], -1), ["size", "reshape"]),
        (lambda x: F.interpolate(x, size=x.shape[2:]), ["size", "getitem", "interpolate"]),
        (lambda x: torch.relu(x).shape, ["relu", "size"]),
        (lambda x: x.size(dim=1) + x.size(-1), ["size", "size", "add"]),
        (lambda x: x.shape[x.shape[0]], ["size", "size", "getitem"]),
        (lambda x: x.to(x.dtype), ["getattr", "to"]),
    ],
)
def test_D35_shape_forms(forward, calls):
    assert sorted(simplified(forward, X)[1]) == sorted(calls)


def test_D35_unpacked_shape():
    class Net(nn.Module):
        def forward(self, x):
            b, c, h, w = x.shape
            return x.reshape(b, c, h * w)

    gm, calls = simplified(Net(), X)
    assert "getattr" not in calls and "getitem" not in calls
    dims = [n.args[1] for n in gm.graph.nodes if n.target == "size"]
    assert dims == [0, 1, 2, 3]


@pytest.mark.parametrize("dim", [None, 0, 1, -1, -4])
@pytest.mark.parametrize("form", ["function", "method", "keyword", "all_keywords"])
def test_D35_unbind_forms(dim, form):
    args, kwargs = ([], {}) if dim is None else ([dim], {"dim": dim})

    def forward(x):
        parts = {
            "function": lambda: torch.unbind(x, *args),
            "method": lambda: x.unbind(*args),
            "keyword": lambda: x.unbind(**kwargs),
            "all_keywords": lambda: torch.unbind(input=x, **kwargs),
        }[form]()
        return parts[0] - parts[-1] * 2

    gm, calls = simplified(forward, X)
    assert calls == ["select", "mul", "select", "sub"] or sorted(calls) == ["mul", "select", "select", "sub"]
    assert {n.args[1:] for n in gm.graph.nodes if n.target == "select"} == {(dim or 0, 0), (dim or 0, -1)}


def test_attention_style_unpacking():
    class Net(nn.Module):
        def forward(self, x):
            q, k, v = x.reshape(2, 3, 20).unbind(1)
            return q * k + v

    assert simplified(Net(), X)[1].count("select") == 3


@pytest.mark.parametrize(
    "forward",
    [
        lambda x: torch.stack(x.unbind(1)[:2]),  # needs the tuple
        lambda x: torch.cat(x.unbind(1)) + x.unbind(0)[0].sum(),  # one of two
        lambda x: x.unbind(1),
        lambda x: torch.unbind(x, x.dim() - 3)[1],  # a computed dim
    ],
)
def test_unbind_stays_where_the_tuple_is_needed(forward):
    assert "unbind" in simplified(forward, X)[1]


def test_unbind_into_many_parts_is_linear_work():
    class Steps(nn.Module):
        def forward(self, x):
            parts = x.unbind(0)
            return sum(parts[i] for i in range(500))

    _, calls = simplified(Steps(), torch.randn(500, 2))
    assert calls.count("select") == 500 and "unbind" not in calls


@pytest.mark.parametrize(
    "forward",
    [
        lambda m, x: torch.relu_(m.fc(x)),
        lambda m, x: F.elu_(m.fc(x), 0.5),
        lambda m, x: F.relu(input=m.fc(x), inplace=True),
        lambda m, x: m.act(input=m.fc(x)),
        lambda m, x: torch.clamp_(input=m.fc(x), min=0.1),
        lambda m, x: (y := m.fc(x), torch.relu_(y), y * 2)[
            -1
        ],  # whoever reads y later reads what was written
    ],
)
def test_in_place_calls_become_plain_ones(forward):
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc, self.act = nn.Linear(4, 4), nn.ReLU(inplace=True)

        def forward(self, x):
            return forward(self, x)

    torch.manual_seed(0)
    gm, _ = simplified(Net(), torch.randn(3, 4))
    assert not any(writes_input(node, gm) for node in gm.graph.nodes)
