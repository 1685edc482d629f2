"""Edits that passes share."""

from __future__ import annotations

import pytest
import torch
from torch import fx, nn

from sparsebit.errors import GraphError
from sparsebit.graph import (
    bypass,
    insert_module_before,
    remove_dead_code,
    remove_unused_modules,
    replace_module,
    replace_modules,
)


class Double(nn.Module):
    def forward(self, *xs):
        return 2 * sum(xs)


def nodes(gm):
    return {n.name: n for n in gm.graph.nodes}


def finish(gm):
    gm.graph.lint()
    gm.recompile()


def test_bypass():
    gm = fx.symbolic_trace(lambda x: torch.tanh(torch.relu(x)))
    bypass(nodes(gm)["relu"], nodes(gm)["x"])
    finish(gm)
    x = torch.randn(3)
    assert torch.equal(gm(x), x.tanh()) and "relu" not in nodes(gm)


def test_replace_module_keeps_the_name_and_the_arguments():
    class Sub(nn.Module):
        def forward(self, x, other):
            return x - other

    gm = fx.symbolic_trace(lambda x, y: torch.tanh(torch.add(x, other=y)))
    node = nodes(gm)["add"]
    node.meta["path"] = "layer1.add"
    replace_module(gm, node, "add", Sub())
    finish(gm)
    assert (node.name, node.op, node.target, node.meta["path"]) == ("add", "call_module", "add", "layer1.add")
    assert torch.equal(gm(torch.ones(1), torch.tensor([3.0])), torch.tanh(torch.tensor([-2.0])))


class Shared(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(2, 2)

    def forward(self, x):
        return self.fc(torch.relu(self.fc(x)))


def test_a_shared_module_stays_for_its_other_calls():
    net, x = Shared(), torch.randn(3, 2)
    gm = fx.symbolic_trace(net)
    replace_module(gm, nodes(gm)["fc"], "fc", nn.Sequential(nn.Identity(), net.fc, Double()))
    finish(gm)
    torch.testing.assert_close(gm(x), net.fc(torch.relu(2 * net.fc(x))))


def test_replacing_all_calls_of_a_shared_module_leaves_nothing_behind():
    gm = fx.symbolic_trace(Shared())
    replace_modules(gm, {nodes(gm)[n]: (n, nn.Linear(2, 2)) for n in ("fc", "fc_1")})
    assert sorted(name for name, _ in gm.named_children()) == ["fc", "fc_1"]
    with pytest.raises(GraphError, match="same module name"):
        replace_modules(gm, {nodes(gm)[n]: ("fc", nn.Linear(2, 2)) for n in ("fc", "fc_1")})


def test_a_function_named_like_a_container():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.add = nn.Sequential(nn.Linear(2, 2), nn.Tanh())
            self.relu = nn.ParameterDict({"w": nn.Parameter(torch.randn(2))})

        def forward(self, x):
            return torch.relu(torch.add(self.add(x), x)) * self.relu["w"]

    net, x = Net(), torch.randn(3, 2)
    gm = fx.symbolic_trace(net)
    replace_modules(gm, {nodes(gm)["add"]: ("add", Double()), nodes(gm)["relu"]: ("relu", nn.ReLU())})
    finish(gm)
    torch.testing.assert_close(gm(x), torch.relu(2 * (net.add(x) + x)) * net.relu["w"])


def test_a_name_that_is_an_attribute_is_refused():
    gm = fx.symbolic_trace(lambda x: x.half())
    with pytest.raises(GraphError, match="half: no module can stand here"):
        replace_module(gm, nodes(gm)["half"], "half", Double())


def test_insert_module_before_covers_every_use_by_the_node_and_no_other():
    gm = fx.symbolic_trace(lambda x: (x + x) * x)
    first = insert_module_before(gm, nodes(gm)["add"], nodes(gm)["x"], "q", Double())
    again = insert_module_before(gm, nodes(gm)["mul"], nodes(gm)["x"], "q", Double())
    finish(gm)
    assert (first.target, again.target) == ("q", "q_1")
    assert torch.equal(gm(torch.tensor(3.0)), torch.tensor((6.0 + 6.0) * 6.0))


def test_D22_dead_code_goes_but_never_the_signature_nor_side_effects():
    def f(a, b, c):
        torch.tanh(b)
        torch.relu(torch.sigmoid(a))
        a.add_(1)
        return a * 2

    gm = fx.symbolic_trace(f)
    assert remove_dead_code(gm) == 3
    finish(gm)
    assert [n.name for n in gm.graph.nodes] == ["a", "b", "c", "add_", "mul", "output"]
    assert torch.equal(gm(torch.ones(1), None, None), torch.tensor([4.0]))


def test_unused_modules_go_and_used_ones_stay():
    class Inner(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight, self.unused = nn.Parameter(torch.ones(1)), nn.Linear(1, 1)

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.block = nn.ModuleDict({"a": nn.Linear(2, 2), "b": nn.Linear(2, 2)})
            self.norm, self.inner, self.nothing = nn.LayerNorm(2), Inner(), nn.Sequential(nn.ReLU())
            self.attention = nn.MultiheadAttention(2, 1)

        def forward(self, x):
            return self.attention(self.block["a"](x) * self.inner.weight, x, x)[0]

    gm = fx.symbolic_trace(Net())
    gm.add_submodule("nothing.more", nn.ReLU())
    for name in ("block.b", "norm", "inner.unused", "nothing"):
        if not any(name == n for n, _ in gm.named_modules()):
            gm.add_submodule(name, nn.ReLU())
    remove_unused_modules(gm)
    assert [n for n, _ in gm.named_modules()] == [
        "",
        "block",
        "block.a",
        "inner",
        "attention",
        "attention.out_proj",
    ]
    assert gm(torch.randn(3, 2)).shape == (3, 2)
