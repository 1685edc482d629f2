"""The pattern language: each feature with a place where it fits and one where it does not."""

from __future__ import annotations

import logging
import operator
import time

import pytest
import torch
import torch.nn.functional as F
from torch import fx, nn

from sparsebit.errors import GraphError
from sparsebit.graph import ANY, Pat, Rule, remove_dead_code

ADD = (operator.add, torch.add)


def finish(gm):
    remove_dead_code(gm)
    gm.graph.lint()
    gm.recompile()


class LeafTracer(fx.Tracer):
    def is_leaf_module(self, m, qualname):
        return not list(m.children())


def anchors(pattern, f):
    gm = fx.GraphModule(f if isinstance(f, nn.Module) else {}, LeafTracer().trace(f))
    return [n.name for n in gm.graph.nodes if pattern.match(n, gm)]


class ConvBn(nn.Module):
    def __init__(self, conv=nn.Conv2d, share=False):
        super().__init__()
        self.conv, self.bn, self.share = conv(3, 4, 1), nn.BatchNorm2d(4), share
        self.bn.running_mean.normal_(), self.bn.running_var.uniform_(0.5, 2)

    def forward(self, x):
        y = self.conv(x)
        return self.bn(y) + y if self.share else self.bn(y)


def fold(m):
    m.gm.set_submodule(m["conv"].target, nn.utils.fuse_conv_bn_eval(m.module("conv"), m.module("bn")))
    return m["conv"]


CONV_BN = Pat(nn.BatchNorm2d, Pat(nn.Conv2d, name="conv"), name="bn")


def test_fold_bn_keeps_the_output():
    net, x = ConvBn().eval(), torch.randn(2, 3, 5, 5)
    gm = fx.symbolic_trace(net)
    ref = net(x)
    assert Rule("fold", CONV_BN, fold).apply(gm) == 1
    finish(gm)
    assert [n.name for n in gm.graph.nodes] == ["x", "conv", "output"]
    torch.testing.assert_close(gm(x), ref)


def test_a_base_class_in_the_pattern_matches_subclasses():
    class MyConv(nn.Conv2d):
        pass

    assert anchors(CONV_BN, ConvBn(MyConv)) == ["bn"]
    assert anchors(Pat(nn.BatchNorm2d, Pat(MyConv)), ConvBn(nn.Conv2d)) == []


def test_sets_of_ops_cover_module_function_and_method():
    relu = Pat((nn.ReLU, F.relu, torch.relu, torch.Tensor.relu))
    assert anchors(relu, lambda x: torch.relu(F.relu(x.relu()))) == ["relu", "relu_1", "relu_2"]
    assert anchors(Pat(torch.relu), lambda x: torch.relu(F.relu(x.relu()))) == ["relu_2"]


def test_inner_nodes_need_one_user_unless_shared():
    assert anchors(CONV_BN, ConvBn(share=True)) == []
    assert anchors(Pat(nn.BatchNorm2d, Pat(nn.Conv2d, shared=True)), ConvBn(share=True)) == ["bn"]


def test_users_inside_the_match_do_not_count_as_sharing():
    swish = Pat(operator.mul, Pat(torch.tanh, name="t"), Pat(torch.sigmoid, Pat(torch.tanh, name="t")))

    def inside(x):
        t = torch.tanh(x)
        return t * torch.sigmoid(t)

    def outside(x):
        t = torch.tanh(x)
        return t * torch.sigmoid(t) + t

    assert anchors(swish, inside) == ["mul"]
    assert anchors(swish, outside) == []


def test_a_name_used_twice_is_the_same_node():
    twice = Pat(operator.mul, Pat(ANY, name="x"), Pat(torch.sigmoid, Pat(ANY, name="x")))
    assert anchors(twice, lambda x, y: x * torch.sigmoid(x)) == ["mul"]
    assert anchors(twice, lambda x, y: y * torch.sigmoid(x)) == []


def test_commutes():
    plain, either = (
        Pat(ADD, Pat(torch.relu), Pat(torch.tanh), commutes=commutes) for commutes in (False, True)
    )
    forward, backward = (lambda x: torch.relu(x) + torch.tanh(x)), (lambda x: torch.tanh(x) + torch.relu(x))
    assert anchors(plain, forward) == anchors(either, forward) == anchors(either, backward) == ["add"]
    assert anchors(plain, backward) == []
    assert anchors(either, lambda x: torch.relu(x) + torch.relu(x)) == []


def test_a_wrong_first_order_is_taken_back():
    """The inner add fits in the written order first; only its other order lets `a` fit twice."""
    inner = Pat(operator.add, Pat(ANY, name="a"), ANY, commutes=True)
    pattern = Pat(operator.mul, inner, Pat(torch.tanh, Pat(ANY, name="a")))
    assert anchors(pattern, lambda x, y: (x + y) * torch.tanh(x)) == ["mul"]
    assert anchors(pattern, lambda x, y: (x + y) * torch.tanh(y)) == ["mul"]
    assert anchors(pattern, lambda x, y: (x + y) * torch.tanh(x * y)) == []


def test_inputs_by_keyword_and_in_lists():
    relu_add = Pat(ADD, Pat(torch.relu), ANY)
    assert anchors(relu_add, lambda x, y: torch.add(torch.relu(x), other=y)) == ["add"]
    assert anchors(relu_add, lambda x, y: torch.add(input=torch.relu(x), other=y)) == ["add"]
    assert anchors(relu_add, lambda x, y: torch.add(y, other=torch.relu(x))) == []
    cat = Pat(torch.cat, Pat(torch.relu), Pat(torch.tanh))
    assert anchors(cat, lambda x: torch.cat([torch.relu(x), torch.tanh(x)], dim=1)) == ["cat"]
    assert anchors(cat, lambda x: torch.cat(tensors=(torch.relu(x), torch.tanh(x)))) == ["cat"]
    assert anchors(cat, lambda x: torch.cat([torch.tanh(x), torch.relu(x)])) == []


def test_the_number_of_inputs_counts_unless_open_ended():
    two, more = Pat(torch.cat, Pat(torch.relu), ANY), Pat(torch.cat, Pat(torch.relu), ...)
    three = lambda x: torch.cat([torch.relu(x), x, x])
    assert anchors(two, three) == [] and anchors(more, three) == ["cat"]
    assert anchors(Pat(operator.add, ANY, ANY), lambda x: x + 1) == []
    assert anchors(Pat(operator.add, ANY), lambda x: x + 1) == ["add"]
    assert anchors(Pat(operator.add), lambda x: (x + 1) + x) == ["add", "add_1"]
    anywhere = Pat(torch.cat, Pat(torch.relu), ..., commutes=True)
    assert anchors(anywhere, lambda x: torch.cat([x, torch.relu(x), x])) == ["cat"]
    assert anchors(anywhere, lambda x: torch.cat([x, torch.tanh(x), x])) == []


def test_where_sees_the_names_below_it():
    def wider(m, node):
        return m.module("conv").out_channels > 3 and node.op == "call_module"

    assert anchors(Pat(nn.BatchNorm2d, Pat(nn.Conv2d, name="conv"), where=wider), ConvBn()) == ["bn"]
    narrow = lambda m, node: m.module("conv").out_channels < 3
    assert anchors(Pat(nn.BatchNorm2d, Pat(nn.Conv2d, name="conv"), where=narrow), ConvBn()) == []


def test_wrong_patterns_and_names_are_refused():
    with pytest.raises(GraphError, match=r"inputs are Pat, ANY"):
        Pat(torch.add, torch.relu)
    gm = fx.symbolic_trace(ConvBn())
    m = CONV_BN.match(next(n for n in gm.graph.nodes if n.name == "bn"), gm)
    with pytest.raises(GraphError, match="no node named 'cnov'; it names bn, conv"):
        m["cnov"]
    assert "conv" in m and "cnov" not in m


def test_a_rule_declines_with_a_reason(caplog):
    rule = Rule("fold", CONV_BN, lambda m: m.decline("the weight is shared"))
    gm = fx.symbolic_trace(ConvBn())
    before = [n.name for n in gm.graph.nodes]
    with caplog.at_level(logging.DEBUG, "sparsebit"):
        assert rule.apply(gm) == 0
    assert rule.declined == [("bn", "the weight is shared")]
    assert "fold: did not change bn: the weight is shared" in caplog.text
    assert [n.name for n in gm.graph.nodes] == before


def test_chains_collapse_in_one_walk():
    net = nn.Sequential(*[nn.Identity() for _ in range(5)], nn.ReLU(), nn.Identity())
    gm = fx.symbolic_trace(net)
    assert Rule("skip", Pat(nn.Identity, ANY), lambda m: m.anchor.args[0]).apply(gm) == 6
    finish(gm)
    x = torch.randn(4)
    assert len(gm.graph.nodes) == 3 and torch.equal(gm(x), x.relu())


def plus(m, a, b):
    with m.gm.graph.inserting_before(m.anchor):
        return m.gm.graph.call_function(operator.add, (a, b))


def test_new_nodes_are_tried_again():
    """((a-b)-c)-d -> a+((b+c)+d)-like sums need the node that a rewrite made to match as an anchor."""

    def flip(m):  # a - (b - c)  ->  (a + c) - b
        with m.gm.graph.inserting_before(m.anchor):
            return m.gm.graph.call_function(operator.sub, (plus(m, m["a"], m["c"]), m["b"]))

    inner = Pat(operator.sub, Pat(ANY, name="b"), Pat(ANY, name="c"), shared=True)
    rule = Rule("flip", Pat(operator.sub, Pat(ANY, name="a"), inner), flip)
    f = lambda a, b, c, d: a - ((b - c) - d)
    gm = fx.symbolic_trace(f)
    args = torch.randn(4, 3).unbind()
    assert rule.apply(gm) == 2  # a - (e - d) -> (a + d) - e, and e is b - c: once more
    finish(gm)
    torch.testing.assert_close(gm(*args), f(*args))
    assert [n.target for n in gm.graph.nodes if n.op == "call_function"] == [
        operator.add,
        operator.add,
        operator.sub,
    ]


def test_a_new_node_may_use_the_anchor():
    def wrap(m):
        with m.gm.graph.inserting_after(m.anchor):
            half = m.gm.graph.call_function(operator.mul, (m.anchor, 0.5))
        with m.gm.graph.inserting_after(half):
            return m.gm.graph.call_function(operator.add, (half, 1))

    gm = fx.symbolic_trace(lambda x: torch.tanh(torch.relu(x)))
    assert Rule("wrap", Pat(torch.relu), wrap).apply(gm) == 1
    finish(gm)
    x = torch.randn(5)
    assert torch.equal(gm(x), torch.tanh(torch.relu(x) * 0.5 + 1))


def test_a_rule_that_matches_what_it_creates_is_stopped():
    def again(m):
        with m.gm.graph.inserting_before(m.anchor):
            return m.gm.graph.call_function(torch.relu, m.anchor.args)

    with pytest.raises(GraphError, match="rule 'again' still matches"):
        Rule("again", Pat(torch.relu), again).apply(fx.symbolic_trace(lambda x: torch.relu(x)))


def test_replaced_inplace_ops_do_not_stay_behind():
    net = nn.Sequential(nn.Tanh(), nn.ReLU(inplace=True), nn.Tanh())
    gm = fx.symbolic_trace(net)

    def to_relu6(m):
        with m.gm.graph.inserting_before(m.anchor):
            return m.gm.graph.call_function(F.relu6, m.anchor.args)

    Rule("relu6", Pat(nn.ReLU), to_relu6).apply(gm)
    finish(gm)
    assert [n.name for n in gm.graph.nodes] == ["input_1", "_0", "relu6", "_2", "output"]


def test_new_nodes_inherit_meta():
    gm = fx.symbolic_trace(lambda x: torch.relu(x))
    for n in gm.graph.nodes:
        n.meta["path"] = f"here.{n.name}"

    def to_tanh(m):
        with m.gm.graph.inserting_before(m.anchor):
            return m.gm.graph.call_function(torch.tanh, m.anchor.args)

    Rule("tanh", Pat(torch.relu), to_tanh).apply(gm)
    assert [n.meta["path"] for n in gm.graph.nodes] == ["here.x", "here.relu", "here.output"]


def test_matching_is_linear():
    """Work is counted, not timed: how often the pattern looks at a node may grow as the graph does."""

    def looks(n):
        seen = 0

        def count(m, node):
            nonlocal seen
            seen += 1
            return True

        net = nn.Sequential(
            *[layer for _ in range(n) for layer in (nn.Conv2d(1, 1, 1), nn.BatchNorm2d(1))]
        ).eval()
        gm = fx.symbolic_trace(net)
        start = time.perf_counter()
        pattern = Pat(nn.BatchNorm2d, Pat(nn.Conv2d, name="conv", where=count), name="bn", where=count)
        assert Rule("fold", pattern, fold).apply(gm) == n
        return seen, time.perf_counter() - start

    (few, short), (many, long) = looks(100), looks(400)
    assert many == 4 * few
    assert long < 12 * short + 0.5  # a quadratic walk takes 16 times as long
