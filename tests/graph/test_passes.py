"""run_passes: order, skipping, checking, error notes, cost."""

from __future__ import annotations

import logging
import time
from types import SimpleNamespace

import pytest
import torch
from torch import fx, nn

from sparsebit.errors import GraphError
from sparsebit.graph import (
    ANY,
    Pat,
    Rule,
    graph_pass,
    insert_module_before,
    op_of,
    replace_modules,
    run_passes,
)
from sparsebit.graph.simplify import SIMPLIFIERS


def net():
    return nn.Sequential(nn.Linear(3, 3), nn.Identity(), nn.Dropout(), nn.ReLU(inplace=True))


def swap(old, new):
    """A pass that puts `new` (a function of a node) in the place of every `old`."""

    def run(gm, ctx):
        return Rule("swap", Pat(old, ...), new).apply(gm)

    return run


def scale_by(factor):
    def rewrite(m):
        with m.gm.graph.inserting_after(m.anchor):
            return m.gm.graph.call_function(torch.mul, (m.anchor, factor))

    return swap(nn.Linear, rewrite)


drop_identity = swap(nn.Identity, lambda m: m.anchor.args[0])


def test_reports_logs_and_cleans_up(caplog):
    gm = fx.symbolic_trace(net())
    off = graph_pass("off", when=lambda cfg: cfg.on)(scale_by(2.0))
    on = graph_pass("on", when=lambda cfg: not cfg.on, keeps_output=True)(drop_identity)
    idle = graph_pass("idle")(lambda gm, ctx: 0)
    with caplog.at_level(logging.DEBUG, "sparsebit"):
        reports = run_passes(gm, [off, on, idle], SimpleNamespace(config=SimpleNamespace(on=False)))
    assert [(r.name, r.changes, r.skipped) for r in reports] == [
        ("off", 0, True),
        ("on", 1, False),
        ("idle", 0, False),
    ]
    assert reports[1].ms > 0
    assert "pass off: skipped" in caplog.text and "pass on: 1 changes" in caplog.text
    assert [n for n, _ in gm.named_children()] == ["0", "2", "3"]  # the identity module went as well
    assert [n.name for n in gm.graph.nodes][1:-1] == ["_0", "_2", "_3"]


def test_the_context_reaches_the_pass():
    seen = []
    ctx = SimpleNamespace(config=None)
    run_passes(fx.symbolic_trace(net()), [graph_pass("look")(lambda gm, c: seen.append(c) or 0)], ctx)
    assert seen == [ctx]


def test_recompiles_once_and_only_after_changes(monkeypatch):
    gm = fx.symbolic_trace(net())
    count = []
    recompile = type(gm).recompile
    monkeypatch.setattr(type(gm), "recompile", lambda self: count.append(1) or recompile(self))
    idle = graph_pass("idle")(lambda gm, ctx: 0)
    run_passes(gm, [idle, graph_pass("drop")(drop_identity), idle])
    assert len(count) == 1


def test_check_names_the_guilty_pass():
    example = (torch.randn(64, 3),)
    good = graph_pass("good", keeps_output=True)(drop_identity)
    meant = graph_pass("meant", keeps_output=False)(scale_by(2.0))
    guilty = graph_pass("guilty", keeps_output=True)(scale_by(1.01))
    reports = run_passes(fx.symbolic_trace(net()), [good, meant, good], check=example)
    assert [r.changes for r in reports] == [1, 1, 0]
    with pytest.raises(GraphError, match="'guilty' must keep the model's output") as caught:
        run_passes(fx.symbolic_trace(net()), [good, meant, guilty], check=example)
    assert "Mismatched elements" in str(caught.value) and "keeps_output=False" in str(caught.value)
    run_passes(fx.symbolic_trace(net()), [good, meant, guilty])  # unchecked: no forward, no complaint


def test_rounding_noise_is_no_change():
    tiny = graph_pass("tiny", keeps_output=True)(scale_by(1 + 1e-6))
    run_passes(fx.symbolic_trace(net()), [tiny], check=(torch.randn(64, 3),))


@pytest.mark.parametrize("after", ["double", "unsqueeze", "structure", "number"])
def test_check_sees_dtype_shape_structure_and_numbers(after):
    class Net(nn.Module):
        def forward(self, x):
            return {"y": torch.relu(x), "rest": [x.size(0), None]}

    def run(gm, ctx):
        output = next(iter(reversed(gm.graph.nodes)))
        value = output.args[0]
        with gm.graph.inserting_before(output):
            if after in ("double", "unsqueeze"):
                y = gm.graph.call_method(after, (value["y"], *([0] if after == "unsqueeze" else [])))
                output.args = ({"y": y, "rest": value["rest"]},)
            else:
                rest = (value["rest"][0], None) if after == "structure" else [2, 3]
                output.args = ({"y": value["y"], "rest": rest},)
        return 1

    with pytest.raises(GraphError, match="'odd' must keep"):
        run_passes(
            fx.symbolic_trace(Net()), [graph_pass("odd", keeps_output=True)(run)], check=(torch.ones(2),)
        )


def test_check_leaves_no_trace():
    """Example, training flags, running statistics and the random state are as before."""
    gm = fx.symbolic_trace(
        nn.Sequential(nn.ReLU(inplace=True), nn.Identity(), nn.BatchNorm1d(3), nn.Dropout())
    )
    gm.train()
    x = torch.randn(4, 3)
    kept, state = x.clone(), torch.get_rng_state()
    run_passes(gm, SIMPLIFIERS, check=(x,))
    assert torch.equal(x, kept) and torch.equal(torch.get_rng_state(), state)
    bn = gm.get_submodule("2")
    assert bn.training and bn.running_mean.abs().sum() == 0 and bn.num_batches_tracked == 0


def test_errors_say_in_which_pass():
    @graph_pass("broken")
    def broken(gm, ctx):
        raise KeyError("nobody")

    with pytest.raises((KeyError, GraphError)) as caught:
        run_passes(fx.symbolic_trace(net()), [broken])
    notes = "".join(getattr(caught.value, "__notes__", [str(caught.value)]))
    assert "in graph pass 'broken'" in notes


def test_a_broken_graph_is_a_graph_error():
    @graph_pass("cycle")
    def cycle(gm, ctx):
        nodes = list(gm.graph.nodes)
        nodes[1].args = (nodes[-2],)
        return 1

    with pytest.raises(GraphError, match="the graph is broken"):
        run_passes(fx.symbolic_trace(net()), [cycle])


def test_D22_unused_inputs_stay_in_the_signature():
    gm = fx.symbolic_trace(lambda a, b, c=None: nn.functional.relu(a))
    run_passes(gm, SIMPLIFIERS)
    a = torch.randn(3)
    assert torch.equal(gm(a, a), a.relu())


@graph_pass("fold", keeps_output=True)
def fold(gm, ctx):
    def rewrite(m):
        gm.set_submodule(m["conv"].target, nn.utils.fuse_conv_bn_eval(m.module("conv"), m.module("bn")))
        return m["conv"]

    return Rule("fold", Pat(nn.BatchNorm2d, Pat(nn.Conv2d, name="conv"), name="bn"), rewrite).apply(gm)


@graph_pass("replace")
def replace(gm, ctx):
    new = {n: (n.name, nn.ReLU6()) for n in gm.graph.nodes if op_of(n, gm) is nn.ReLU}
    replace_modules(gm, new)
    return len(new)


@graph_pass("insert")
def insert(gm, ctx):
    convs = [n for n in gm.graph.nodes if op_of(n, gm) is nn.Conv2d]
    for n in convs:
        insert_module_before(gm, n, n.args[0], f"{n.name}_q", nn.Identity())
    return len(convs)


@graph_pass("mark")
def mark(gm, ctx):
    return Rule("mark", Pat(nn.ReLU6, Pat(nn.Conv2d, ANY)), lambda m: m.anchor).apply(gm)


def build_time(blocks):
    layers = [nn.Conv2d(1, 1, 1), nn.BatchNorm2d(1), nn.Identity(), nn.ReLU()] * blocks
    gm = fx.symbolic_trace(nn.Sequential(*layers).eval())  # shared layers: the graph is what is large
    for i, node in enumerate(n for n in gm.graph.nodes if n.op == "call_module"):
        gm.add_submodule(f"m{i}", type(layers[i % 4])(*([1, 1, 1], [1], [], [])[i % 4]).eval())
        node.target = f"m{i}"
    gm.recompile()
    start = time.process_time()
    reports = run_passes(gm, [*SIMPLIFIERS, fold, replace, insert, mark, mark])
    seconds = time.process_time() - start
    changes = {r.name: r.changes for r in reports}
    assert all(changes[name] == blocks for name in ("remove_identity", "fold", "replace", "insert", "mark"))
    return seconds


def test_a_graph_of_2000_nodes_takes_linear_time():
    build_time(10)  # warm up
    small, large = min(build_time(125) for _ in range(2)), min(build_time(500) for _ in range(2))
    assert large < 2, f"2000 nodes took {large:.2f} s"
    assert large < 8 * small + 0.2, f"500 nodes {small:.2f} s, 2000 nodes {large:.2f} s"  # quadratic: 16 x
