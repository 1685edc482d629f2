"""SubgraphMatcher: ops, checkers, input order, SUBSET, joint checkers."""

from __future__ import annotations

import operator

import pytest
import torch
import torch.nn.functional as F
from torch import fx, nn

from sparsebit.errors import GraphError
from sparsebit.quantization.converters.utils import (
    InputMatchingType,
    MatchingNode,
    SubgraphMatcher,
)
from sparsebit.quantization.converters.utils.subgraph_matching_utils import (
    get_operators,
    get_operators_type,
    recursive_getattr,
)

SUBSET = InputMatchingType.SUBSET


def conv_bn_relu(blocks=1):
    layers = []
    for _ in range(blocks):
        bn = nn.BatchNorm2d(2)
        bn.running_mean.normal_(), bn.running_var.uniform_(0.5, 2)
        layers += [nn.Conv2d(2, 2, 1), bn, nn.ReLU()]
    return nn.Sequential(*layers).eval()


def find(nodes, f, joint=()):
    gm = fx.symbolic_trace(f)
    found, modules = SubgraphMatcher(nodes, list(joint)).apply(gm)
    return None if found is None else {k: n.name for k, n in found.items()}, modules


def test_checkers_see_node_and_module():
    seen = []

    def checker(node, module):
        seen.append((node.name, module))
        return module is F.relu

    nodes = [MatchingNode("act", inputs=[None], op_type=[F.relu, torch.Tensor.relu], checker=checker)]
    assert find(nodes, lambda x: F.relu(x.relu()))[0] == {"act": "relu_1"}
    assert seen == [("relu", torch.Tensor.relu), ("relu_1", F.relu)]


def test_op_types_of_every_kind():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.w, self.block = nn.Parameter(torch.ones(1)), nn.Sequential(nn.Linear(2, 2))

        def forward(self, x):
            return (self.block(x) * self.w).relu()

    gm = fx.symbolic_trace(Net())
    nodes, modules = list(gm.graph.nodes), dict(gm.named_modules())
    kinds = [None, nn.Linear, nn.Parameter, operator.mul, torch.Tensor.relu, None]
    assert get_operators_type(nodes, gm, modules) == kinds
    assert get_operators(nodes, gm, modules) == [
        None,
        gm.get_submodule("block.0"),
        gm.w,
        operator.mul,
        torch.Tensor.relu,
        None,
    ]
    assert recursive_getattr(gm, "block.0.weight") is gm.get_submodule("block.0").weight
    assert recursive_getattr(gm, "block.7.weight", 5) == 5 and recursive_getattr(gm, "") is gm


def test_base_classes_match_subclasses():
    class MyReLU(nn.ReLU):
        __module__ = "torch.nn.mine"  # a leaf for fx

    gm = fx.symbolic_trace(nn.Sequential(MyReLU()))
    assert SubgraphMatcher([MatchingNode("a", [None], [nn.ReLU])], []).apply(gm)[0] is not None
    gm = fx.symbolic_trace(nn.Sequential(nn.ReLU()))
    assert SubgraphMatcher([MatchingNode("a", [None], [MyReLU])], []).apply(gm) == (None, None)


def add_pattern(inputs, kind):
    return [
        MatchingNode("r", [None], [torch.relu]),
        MatchingNode("t", [None], [torch.tanh]),
        MatchingNode("add", inputs, [operator.add, torch.cat], input_match_type=kind),
    ]


ORDERED = lambda x: torch.relu(x) + torch.tanh(x)
SWAPPED = lambda x: torch.tanh(x) + torch.relu(x)
WIDER = lambda x: torch.cat([x, torch.tanh(x), x, torch.relu(x)])


def test_all_wants_the_order_and_the_number():
    pattern = add_pattern(["r", "t"], InputMatchingType.ALL)
    assert find(pattern, ORDERED)[0] == {"r": "relu", "t": "tanh", "add": "add"}
    assert find(pattern, SWAPPED)[0] is None and find(pattern, WIDER)[0] is None


def test_D41_subset_takes_any_order_and_more_inputs():
    pattern = add_pattern(["r", "t"], SUBSET)
    assert find(pattern, ORDERED)[0] == find(pattern, SWAPPED)[0] == {"r": "relu", "t": "tanh", "add": "add"}
    assert find(pattern, WIDER)[0] == {"r": "relu", "t": "tanh", "add": "cat"}
    assert find(pattern, lambda x: torch.relu(x) + torch.relu(x))[0] is None


def test_D41_subset_needs_a_place_for_every_input():
    """None takes a place of its own: relu, tanh and one more."""
    pattern = add_pattern([None, "r", "t"], SUBSET)
    assert find(pattern, WIDER)[0] == {"r": "relu", "t": "tanh", "add": "cat"}
    assert find(pattern, SWAPPED)[0] is None


def test_D41_subset_counts_a_name_used_twice():
    pattern = [
        MatchingNode("r", [None], [torch.relu]),
        MatchingNode("cat", ["r", "r"], [torch.cat], input_match_type=SUBSET),
    ]
    assert find(pattern, lambda x: torch.cat([torch.relu(x), x]))[0] is None

    def twice(x):
        y = torch.relu(x)
        return torch.cat([y, x, y])

    assert find(pattern, twice)[0] == {"r": "relu", "cat": "cat"}


def test_different_names_are_different_nodes():
    pattern = [
        MatchingNode("a", [None], [torch.relu]),
        MatchingNode("b", [None], [torch.relu]),
        MatchingNode("add", ["a", "b"], [operator.add], input_match_type=SUBSET),
    ]
    assert find(pattern, lambda x: torch.relu(x) + torch.relu(x))[0] == {
        "a": "relu",
        "b": "relu_1",
        "add": "add",
    }

    def same(x):
        y = torch.relu(x)
        return y + y

    assert find(pattern, same)[0] is None


def test_D41_joint_checker_gets_its_modules_by_name():
    """The original handed over {'relu': ReLU, 'conv': BatchNorm2d} for a checker of conv and bn."""
    seen = []

    def same_width(bn, relu, modules):
        seen.append((bn.name, relu.name, {k: type(m) for k, m in modules.items()}))
        return modules["bn"].num_features == 2

    nodes = [
        MatchingNode("conv", [None], [nn.Conv2d]),
        MatchingNode("bn", ["conv"], [nn.BatchNorm2d]),
        MatchingNode("relu", ["bn"], [nn.ReLU]),
    ]
    found = find(nodes, conv_bn_relu(), [(("bn", "relu"), same_width)])[0]
    assert found == {"conv": "_0", "bn": "_1", "relu": "_2"}
    assert seen == [("_1", "_2", {"bn": nn.BatchNorm2d, "relu": nn.ReLU})]
    refuse = [
        (("conv", "bn"), lambda conv, bn, modules: modules["conv"].out_channels != modules["bn"].num_features)
    ]
    assert find(nodes, conv_bn_relu(), refuse)[0] is None


def test_a_node_used_twice_counts_once_or_twice():
    for inputs in ([None], [None, None]):
        assert find([MatchingNode("add", inputs, [operator.add])], lambda x: x + x)[0] == {"add": "add"}
    assert find([MatchingNode("add", [None] * 3, [operator.add])], lambda x: x + x)[0] is None


@pytest.mark.parametrize(
    "nodes, joint, message",
    [
        ([("a", []), ("a", ["a"])], [], "different names"),
        ([("a", ["b"]), ("b", [])], [], "must be MatchingNodes before it"),
        ([("a", []), ("b", [None])], [], "not connected"),
        ([("a", [])], [(("a", "c"), None)], "no MatchingNode is named"),
    ],
)
def test_wrong_patterns_are_refused(nodes, joint, message):
    with pytest.raises(GraphError, match=message):
        SubgraphMatcher([MatchingNode(name, inputs, [torch.relu]) for name, inputs in nodes], joint)
