"""The original pass API: users' own ReplacePatternBase classes run as they did."""

from __future__ import annotations

import operator
import time

import pytest
import torch
from torch import fx, nn

from sparsebit.errors import GraphError
from sparsebit.quantization.converters.prune import PruneGraph
from sparsebit.quantization.converters.simplifiers import simplify
from sparsebit.quantization.converters.utils import (
    MatchingNode,
    ReplacePatternBase,
)
from sparsebit.quantization.converters.utils.subgraph_matching_utils import (
    ReplaceStrategy,
    SubgraphMatchingTimer,
)


def conv_bn_relu(blocks=1):
    layers = []
    for _ in range(blocks):
        bn = nn.BatchNorm2d(2)
        bn.running_mean.normal_(), bn.running_var.uniform_(0.5, 2)
        layers += [nn.Conv2d(2, 2, 1), bn, nn.ReLU()]
    return nn.Sequential(*layers).eval()


class FuseBn(ReplacePatternBase):
    def make_nodes(self):
        return [
            MatchingNode("conv", inputs=[None], op_type=[nn.Conv2d]),
            MatchingNode("bn", inputs=["conv"], op_type=[nn.BatchNorm2d]),
        ]

    def get_new_graph(self, nodes_dict, modules_dict, model=None, transform_idx=None):
        fused = nn.utils.fuse_conv_bn_eval(modules_dict["conv"], modules_dict["bn"])
        name = f"fused_{transform_idx}"
        model.add_module(name, fused)
        with model.graph.inserting_after(nodes_dict["conv"]):
            new = model.graph.create_node("call_module", name, nodes_dict["conv"].args, name=name)
        return {"bn": new}


def test_apply_replaces_everywhere_and_keeps_the_output():
    gm = fx.symbolic_trace(conv_bn_relu(3))
    x = torch.randn(1, 2, 3, 3)
    ref = gm(x)
    assert FuseBn().apply(gm) is True
    assert [n.name for n in gm.graph.nodes][1:-1] == ["fused_0", "_2", "fused_1", "_5", "fused_2", "_8"]
    torch.testing.assert_close(gm(x), ref)
    assert FuseBn().apply(gm) is False


def test_apply_once_and_the_once_strategy_replace_one_place():
    class Once(FuseBn):
        def make_matching_strategy(self):
            return ReplaceStrategy.APPLY_ONCE

    for run in (lambda gm: FuseBn().apply_once(gm), lambda gm: Once().apply(gm)):
        gm = fx.symbolic_trace(conv_bn_relu(3))
        assert run(gm) is True
        assert [n.name for n in gm.graph.nodes][1:3] == ["fused_0", "_2"] and len(gm.graph.nodes) == 2 + 8


def test_several_outputs():
    """Two activations of one tensor become one call that computes both."""

    def both(x):
        return torch.relu(x), torch.tanh(x)

    class Join(ReplacePatternBase):
        def make_nodes(self):
            return [
                MatchingNode("lin", [None], [nn.Linear]),
                MatchingNode("r", ["lin"], [torch.relu]),
                MatchingNode("t", ["lin"], [torch.tanh]),
            ]

        def get_new_graph(self, nodes_dict, modules_dict, model, transform_idx):
            graph = model.graph
            with graph.inserting_after(nodes_dict["lin"]):
                pair = graph.call_function(both, (nodes_dict["lin"],))
            with graph.inserting_after(pair):
                first, second = (graph.call_function(operator.getitem, (pair, i)) for i in (0, 1))
            return {"r": first, "t": second}

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(3, 3)

        def forward(self, x):
            y = self.fc(x)
            return torch.tanh(y) - torch.relu(y)

    net = Net()
    gm, x = fx.symbolic_trace(net), torch.randn(2, 3)
    assert Join().apply(gm) is True
    assert torch.equal(gm(x), net(x))
    assert [n.target for n in gm.graph.nodes if n.op == "call_function"][:1] == [both]
    assert "tanh" not in [n.name for n in gm.graph.nodes]


def test_shared_values_may_match():
    """A conv with two activations: both pairs match, each once."""

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv, self.a, self.b = nn.Conv2d(1, 1, 1), nn.ReLU(), nn.ReLU()

        def forward(self, x):
            y = self.conv(x)
            return self.a(y) + self.b(y)

    class Mark(ReplacePatternBase):
        marked = 0

        def make_nodes(self):
            return [MatchingNode("conv", [None], [nn.Conv2d]), MatchingNode("act", ["conv"], [nn.ReLU])]

        def get_new_graph(self, nodes_dict, modules_dict, model, transform_idx):
            self.marked += 1
            return {
                "act": nodes_dict["act"]
            }  # nothing moves: the original went on for ever without a checker

    mark = Mark()
    assert mark.apply(fx.symbolic_trace(Net())) is True
    assert mark.marked == 2


def test_a_pattern_that_matches_its_own_result_is_stopped():
    class Again(ReplacePatternBase):
        def make_nodes(self):
            return [MatchingNode("relu", [None], [torch.relu])]

        def get_new_graph(self, nodes_dict, modules_dict, model, transform_idx):
            with model.graph.inserting_after(nodes_dict["relu"]):
                return {"relu": model.graph.call_function(torch.relu, nodes_dict["relu"].args)}

    with pytest.raises(GraphError, match="Again still matches"):
        Again().apply(fx.symbolic_trace(lambda x: torch.relu(x)))


def test_abstract_methods_say_so():
    with pytest.raises(NotImplementedError, match="must override make_nodes"):
        ReplacePatternBase()


def test_timer_counts():
    timer = SubgraphMatchingTimer()
    assert [timer.get_idx() for _ in range(3)] == [0, 1, 2]


def test_D22_prune_keeps_the_signature():
    def f(a, b):
        torch.relu(torch.tanh(b))
        return torch.relu(a)

    gm = fx.symbolic_trace(f)
    assert PruneGraph().apply(gm) is gm
    assert [n.name for n in gm.graph.nodes] == ["a", "b", "relu_1", "output"]
    a = torch.randn(3)
    assert torch.equal(gm(a, None), a.relu())


def test_simplify_runs_the_simplifiers():
    gm = simplify(fx.symbolic_trace(nn.Sequential(nn.Identity(), nn.Flatten())))
    assert [n.name for n in gm.graph.nodes][1:-1] == ["_1"]


def test_sweeps_are_linear():
    def seconds(blocks):
        gm = fx.symbolic_trace(conv_bn_relu(blocks))
        start = time.process_time()
        assert FuseBn().apply(gm)
        return time.process_time() - start

    seconds(5)
    small, large = min(seconds(40) for _ in range(2)), min(seconds(160) for _ in range(2))
    assert large < 8 * small + 0.2, f"40 blocks {small:.2f} s, 160 blocks {large:.2f} s"  # quadratic: 16 x
