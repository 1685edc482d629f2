"""What a node is: its op, inputs and side effects."""

from __future__ import annotations

import operator

import pytest
import torch
import torch.nn.functional as F
from torch import fx, nn

from sparsebit.errors import GraphError
from sparsebit.graph import has_effect, inputs_of, is_op, module_calls, module_of, op_of, ops


class MyConv(nn.Conv2d):
    pass


class LeafTracer(fx.Tracer):
    def is_leaf_module(self, m, qualname):
        return not list(m.children())


def trace(net):
    return fx.GraphModule(net, LeafTracer().trace(net))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = MyConv(3, 4, 1)
        self.scale = nn.Parameter(torch.ones(1))

    def forward(self, x):
        y = self.conv(x) * self.scale
        return F.relu(y).flatten(1).no_such_method()


def by_name(gm):
    return {n.name: n for n in gm.graph.nodes}


def test_op_of_every_kind():
    gm = trace(Net())
    ops = {n.name: op_of(n, gm) for n in gm.graph.nodes}
    assert ops == {
        "x": "placeholder",
        "conv": MyConv,
        "scale": "get_attr",
        "mul": operator.mul,
        "relu": F.relu,
        "flatten": torch.Tensor.flatten,
        "no_such_method": "no_such_method",
        "output": "output",
    }


def test_is_op_accepts_subclasses_and_only_downwards():
    assert is_op(MyConv, {nn.Conv2d}) and is_op(torch.relu, {torch.relu})
    assert not is_op(nn.Conv2d, {MyConv}) and not is_op(F.relu, {torch.relu})


def test_module_of_says_what_is_wrong():
    gm = trace(Net())
    assert module_of(by_name(gm)["conv"], gm) is gm.conv
    with pytest.raises(GraphError, match="mul: is a call_function"):
        module_of(by_name(gm)["mul"], gm)


def test_inputs_of_flattens_and_keeps_duplicates():
    def f(x, y, i):
        a = torch.cat([x, y], dim=0)
        b = torch.add(x, other=y)
        c = x[0:i]
        return a, b, c, x + x, x + 1

    nodes = by_name(fx.symbolic_trace(f))
    names = {k: [n.name for n in inputs_of(nodes[k])] for k in ("cat", "add", "getitem", "add_1", "add_2")}
    assert names == {
        "cat": ["x", "y"],
        "add": ["x", "y"],
        "getitem": ["x", "i"],
        "add_1": ["x", "x"],
        "add_2": ["x"],
    }


def test_module_calls():
    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(2, 2), nn.Linear(2, 2)

        def forward(self, x):
            return self.a(self.b(self.a(x)))

    assert module_calls(fx.symbolic_trace(Twice())) == {"a": 2, "b": 1}


def test_effects():
    class Inplace(nn.Module):
        def __init__(self):
            super().__init__()
            self.hot, self.cold = nn.ReLU(inplace=True), nn.ReLU()

        def forward(self, x):
            self.hot(x)
            self.cold(x)
            x.add_(1)
            x.add(1)
            F.relu(x, inplace=True)
            F.relu(x)
            torch.relu_(x)
            torch.add(x, 1, out=x)
            return x

    gm = fx.symbolic_trace(Inplace())
    x, *_, output = gm.graph.nodes
    with gm.graph.inserting_before(output):
        gm.graph.call_function(operator.setitem, (x, 0, 0))
        gm.graph.call_function(operator.iadd, (x, 1))
        gm.graph.call_method("__getitem__", (x, 0))
    kept = [n.name for n in gm.graph.nodes if has_effect(n, gm)]
    assert kept == ["x", "hot", "add_", "relu", "relu_", "add_1", "setitem", "iadd", "output"]


def test_what_is_bookkeeping_is_an_attribute_not_a_file_name():
    @ops.bookkeeping
    def check(x):
        pass

    class Note(nn.Module):
        bookkeeping = True

        def forward(self, x):
            return x

    graph = fx.Graph()
    x = graph.placeholder("x")
    nodes = [
        graph.call_function(check, (x,)),
        graph.call_module("note", (x,)),
        graph.call_function(F.relu, (x,)),
    ]
    fx.GraphModule({"note": Note()}, graph)
    assert [ops.is_bookkeeping(node) for node in nodes] == [True, True, False]
    assert nodes[0].is_impure()  # nobody reads its result, and it must stay
