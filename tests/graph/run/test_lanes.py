"""The lane engine against the plain forward: same values, few of them alive, shared where nothing differs."""

import pytest
import torch
from torch import fx, nn

from sparsebit.errors import ConfigError
from sparsebit.graph.run.lanes import Lane, advance
from sparsebit.graph.run.stores import Store


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b, self.c = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 2)

    def forward(self, x, scale=2.0, *, mask=None):
        y = torch.relu(self.a(x)) * scale
        parts = torch.split(self.b(y) + x, 2, dim=-1)
        out = self.c(torch.cat([parts[1], parts[0]], -1))
        return {"out": out, "parts": parts} if mask is None else out


@pytest.fixture
def gm():
    torch.manual_seed(0)
    return fx.symbolic_trace(Net().eval(), concrete_args={"mask": None})


def walk(gm, lane):
    peak, result = 0, None
    for node in gm.graph.nodes:
        lane.step(node)
        peak = max(peak, sum(map(len, lane.values)))
        if node.op == "output":
            result = list(lane.outputs(node))
    return result, peak


@pytest.mark.parametrize("keep", ["device", "cpu", "disk"])
def test_same_values_as_the_forward(gm, keep):
    batches = [((torch.randn(3, 4),), {}), ((torch.randn(5, 4),), {"scale": 0.5})]
    store = Store(keep)
    with torch.no_grad():
        got, _ = walk(gm, Lane(gm, batches, store))
        for (args, kwargs), value in zip(batches, got):
            want = gm(*args, **kwargs)
            assert torch.equal(value["out"], want["out"])
            assert all(torch.equal(p, q) for p, q in zip(value["parts"], want["parts"]))
    store.close()


def test_values_die_after_their_last_use(gm):
    with torch.no_grad():
        _, peak = walk(gm, Lane(gm, [((torch.randn(3, 4),), {})]))
    assert peak <= 6 < len(gm.graph.nodes)


def test_disk_keeps_no_files_behind(gm, tmp_path, monkeypatch):
    import tempfile

    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    store = Store("disk")
    folder = next(tmp_path.iterdir())
    lane = Lane(gm, [((torch.randn(3, 4),), {})], store)
    most = 0
    with torch.no_grad():
        for node in gm.graph.nodes:
            lane.step(node)
            most = max(most, len(list(folder.iterdir())))
    assert 0 < most <= 8  # files go with their values
    store.close()
    assert not list(tmp_path.iterdir())


def test_a_second_lane_shares_what_does_not_differ(gm):
    """From `b` on the lanes differ; before it the second lane computes nothing."""
    calls = []
    gm.a.register_forward_hook(lambda *_: calls.append("a"))
    gm.c.register_forward_hook(lambda *_: calls.append("c"))
    first = Lane(gm, [((torch.randn(3, 4),), {})])
    second = Lane(gm, first._batches, base=first, differs=lambda node: node.target == "b")
    with torch.no_grad():
        for node in gm.graph.nodes:
            advance(node, [first, second])
            same = first.values[0].get(node) is second.values[0].get(node)
            if node.name in ("a", "relu"):
                assert same
    assert calls == ["a", "c", "c"]


def test_unknown_place(gm):
    with pytest.raises(ConfigError, match="not one of device, cpu, disk"):
        Store("moon")


@fx.wrap
def changes_its_list(x, sizes):
    sizes[0] = 3
    return x * sizes[0]


def test_a_function_may_change_the_literal_list_it_gets():
    class Net(nn.Module):
        def forward(self, x):
            return changes_its_list(x, [1, 2])

    gm = fx.symbolic_trace(Net())
    lane = Lane(gm, [((torch.ones(2),), {})])
    for node in gm.graph.nodes:
        lane.step(node)
    assert next(lane.outputs(node)).tolist() == [3, 3]
