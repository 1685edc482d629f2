"""An `if` on sizes goes the way of the example, where the tracer may decide; the graph refuses what goes another."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from sparsebit.errors import TraceError
from sparsebit.graph.trace.from_module import trace
from sparsebit.graph.trace.tracer import LeafTracer


def decided(net: nn.Module, *args, **kwargs):
    return trace(net.eval(), LeafTracer(decides=True), (args, kwargs))


class Pads(nn.Module):
    """To whole windows, as transformers of pictures do."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 1)

    def forward(self, x):
        h, w = x.shape[2:]
        right, bottom = (4 - w % 4) % 4, (4 - h % 4) % 4
        if right > 0 or bottom > 0:
            x = F.pad(x, (0, right, 0, bottom))
        return self.conv(x).unfold(2, 4, 4)


class OddOnes(nn.Module):
    """The number itself is the condition."""

    def forward(self, x):
        if x.shape[0] % 2:
            return x + 1
        return x - max(x.shape[0], x.shape[1])


class ByValue(nn.Module):
    def forward(self, x):
        return x + 1 if x.sum() > 0 else x - 1


@pytest.mark.parametrize("example, same, other", [(8, 12, 9), (9, 10, 8)])
def test_sizes_decide_and_other_ways_are_refused(example, same, other):
    net, picture = Pads(), lambda n: torch.randn(2, 3, n, n)
    gm = decided(net, picture(example))
    assert gm.meta["islands"] == {}
    for n in (example, same):
        x = picture(n)
        torch.testing.assert_close(gm(x), net(x))
    with pytest.raises(
        TraceError, match=r"test_decisions.py:\d+: if right > 0 or bottom > 0:\n  fix: take an"
    ):
        gm(picture(other))


@pytest.mark.parametrize("rows", [3, 4])
def test_a_number_is_a_condition_too(rows):
    net = OddOnes()
    gm = decided(net, torch.randn(rows, 5))
    assert gm.meta["islands"] == {}
    for x in (torch.randn(rows, 5), torch.randn(rows - 2, 5)):
        torch.testing.assert_close(gm(x), net(x))
    with pytest.raises(TraceError, match="another branch"):
        gm(torch.randn(rows + 1, 5))


@pytest.mark.parametrize("tracer, example", [(LeafTracer(), True), (LeafTracer(decides=True), False)])
def test_without_leave_or_an_example_nothing_is_decided(tracer, example):
    net, x = Pads().eval(), torch.randn(2, 3, 9, 9)
    gm = trace(net, tracer, ((x,), {}) if example else None)
    assert list(gm.meta["islands"]) == [""]
    torch.testing.assert_close(gm(x[..., :8]), net(x[..., :8]))


def test_values_decide_nothing():
    gm = decided(ByValue(), torch.randn(4))
    assert list(gm.meta["islands"]) == [""]
    for x in (torch.ones(4), -torch.ones(4)):
        assert torch.equal(gm(x), ByValue()(x))


def test_the_check_is_traced_pickled_scripted_and_exported():
    net, x, other = Pads(), torch.randn(2, 3, 8, 8), torch.randn(2, 3, 9, 9)
    gm = decided(net, x)
    again = trace(copy.deepcopy(gm), LeafTracer(), ((x,), {}))
    for each in (again, pickle.loads(pickle.dumps(gm))):
        torch.testing.assert_close(each(x), net(x))
        with pytest.raises(TraceError, match="another branch"):
            each(other)
    scripted = torch.jit.script(gm)
    torch.testing.assert_close(scripted(x), net(x))
    with pytest.raises(Exception, match="another branch"):
        scripted(other)
    exported = torch.export.export(gm, (x,)).module()
    torch.testing.assert_close(exported(x), net(x))


@pytest.mark.parametrize("dynamic", [None, True])
def test_the_check_is_compiled(dynamic):
    net, x = Pads(), torch.randn(2, 3, 8, 8)
    compiled = torch.compile(decided(net, x), backend="eager", dynamic=dynamic)
    for n in (8, 12):
        torch.testing.assert_close(compiled(torch.ones(2, 3, n, n)), net(torch.ones(2, 3, n, n)))
    with pytest.raises(TraceError, match="another branch"):
        compiled(torch.randn(2, 3, 9, 9))


@pytest.mark.parametrize(
    "asks",
    [
        lambda x: x.requires_grad,
        lambda x: x.is_contiguous() and x.shape[0] > 0,
        lambda x: x.device.type == "cpu",
        lambda x: x.stride(0) > 2,
    ],
)
def test_what_another_run_has_otherwise_decides_nothing(asks):
    class Asks(nn.Module):
        def forward(self, x):
            return x + 1 if asks(x) else x - 1

    assert list(decided(Asks(), torch.randn(3, 4)).meta["islands"]) == [""]


class Expands(nn.Module):
    """For a batch of one it would be the same without the `if`."""

    def __init__(self):
        super().__init__()
        self.register_buffer("places", torch.arange(6.0)[None])

    def forward(self, x):
        places = self.places
        if x.shape[0] != places.shape[0]:
            places = places.expand(x.shape[0], -1)
        return x + places


class Squeezes(nn.Module):
    def forward(self, x):
        x = x * 2
        return x[0] if x.shape[0] == 1 else x


@pytest.mark.parametrize("batch", [1, 2, 5])
def test_a_way_that_is_right_for_all_batches_is_not_checked(batch):
    net = Expands()
    gm = decided(net, torch.randn(batch, 6))
    assert gm.meta["islands"] == {}
    for n in (1, 2, 5, 9):
        x = torch.randn(n, 6)
        torch.testing.assert_close(gm(x), net(x))


def test_a_way_that_is_wrong_for_other_batches_is_checked():
    gm = decided(Squeezes(), torch.randn(3, 6))
    assert torch.equal(gm(torch.ones(2, 6)), torch.full((2, 6), 2.0))
    with pytest.raises(TraceError, match=r"return x\[0\] if x.shape\[0\] == 1 else x"):
        gm(torch.ones(1, 6))


class Halves(nn.Module):
    """Behind something that knows the device."""

    def forward(self, x):
        x = x + torch.arange(x.shape[1], device=x.device)
        return x.clamp(-1, 1) if x.dtype == torch.float16 else x


def test_types_decide():
    gm = decided(Halves(), torch.randn(3, 4))
    assert gm.meta["islands"] == {}
    with pytest.raises(TraceError, match="another branch"):
        gm(torch.randn(3, 4).half())


class TwoAtOnce(nn.Module):
    """The first makes no difference for the batches that are tried, the second does for other sizes."""

    def forward(self, x):
        if x.shape[0] != 1 or x.shape[1] % 4:
            x = F.pad(x, (0, -x.shape[1] % 4))
        return x.unflatten(1, (-1, 4))


def test_checks_on_one_line_are_looked_at_one_by_one():
    net = TwoAtOnce()
    gm = decided(net, torch.randn(1, 8))
    torch.testing.assert_close(gm(torch.ones(5, 8)), net(torch.ones(5, 8)))
    with pytest.raises(TraceError, match=r"if x.shape\[0\] != 1 or x.shape\[1\] % 4"):
        gm(torch.randn(1, 9))
