"""Code that is in very many models: positions from a buffer, sizes unpacked from a shape, masks by dtype, windows,
loops over parts. It is traced without islands, and so pruned and quantized through."""

from __future__ import annotations

import pickle

import pytest
import torch
from idiom_nets import MODELS
from torch import Tensor, fx, nn
from torch.utils import _pytree as pytree

import sparsebit
from sparsebit.graph.trace.from_module import trace
from sparsebit.graph.trace.tracer import LeafTracer
from sparsebit.sparse.sparse_model import SparseModel
from sparsebit.sparse.trace.front_end import call_of


def run(model: nn.Module, data) -> list[Tensor]:
    args, kwargs = call_of(data, model)
    with torch.no_grad():
        return pytree.tree_leaves(model(*args, **kwargs))


def assert_close(a: nn.Module, b: nn.Module, data, tolerance: float) -> None:
    for got, want in zip(run(a, data), run(b, data), strict=True):
        torch.testing.assert_close(got, want, rtol=tolerance, atol=tolerance)


@pytest.fixture(params=MODELS)
def case(request):
    make, data, other = MODELS[request.param]
    torch.manual_seed(0)
    return make().eval(), data, [data(2), data(5), data(1)] + ([] if other is None else [data(3, other)])


def test_is_traced_without_islands(case):
    model, data, inputs = case
    gm = trace(
        model, LeafTracer(is_known=lambda op: op is nn.TransformerEncoderLayer), call_of(data(2), model)
    )
    assert gm.meta["islands"] == {}
    for each in inputs:  # neither the batch nor the length is baked in
        assert_close(gm, model, each, 1e-6)


def test_is_pruned(case):
    model, data, inputs = case
    small = sparsebit.prune(model, data(2), ratio=0.5)
    count = lambda m: sum(p.numel() for p in m.parameters())
    assert count(small) < 0.8 * count(model)
    smodel = SparseModel(model, {"SPARSER": {"TYPE": "l1norm", "RATIO": 0.5}}, data(2)).eval()
    smodel.calc_params()
    compact = smodel.compact().eval()
    assert count(compact) == count(small)
    for each in inputs:
        assert_close(compact, smodel, each, 1e-4)
        assert_close(small, smodel, each, 1e-4)


def test_is_quantized(case):
    model, data, inputs = case
    qmodel = sparsebit.quantize(model, [data(2)])
    for each in inputs:
        for got, want in zip(run(qmodel, each), run(model, each), strict=True):
            assert got.shape == want.shape
            assert (got - want).norm() < 0.3 * want.norm()


def test_is_pickled_after_pruning(case):
    """A graph is unpickled by tracing its code."""
    model, data, inputs = case
    small = sparsebit.prune(model, data(2), ratio=0.5)
    again = pickle.loads(pickle.dumps(small))
    for each in inputs:
        assert_close(again, small, each, 1e-6)


# -- what stays an island, because a graph would be wrong --------------------------------------------------
class Base(nn.Module):
    def __init__(self, run):
        super().__init__()
        torch.manual_seed(0)
        self.fc, self.run = nn.Linear(4, 4), run
        self.register_buffer("table", torch.arange(24.0).reshape(6, 4))

    def forward(self, x):
        return self.run(self, x)


def writes_constant(m, x):
    total = torch.zeros(4)
    total += x[0]
    return m.fc(x) + total


def writes_view(m, x):
    part = m.table[: x.shape[0]]
    part += x
    return m.fc(x) + part


def writes_slice(m, x):
    m.table[: x.shape[0]] = x
    return m.fc(x) + m.table.sum()


def copies_into_view(m, x):
    m.table[: x.shape[0]].unsqueeze(0).mul_(x)
    return m.fc(x) + m.table.sum()


def repeats(m, x):
    for _ in range(int(x.shape[0] / 2)):
        x = m.fc(x)
    return x


ROWS = torch.linspace(-1, 1, 20).reshape(5, 4)


@pytest.mark.parametrize("example", [True, False])
@pytest.mark.parametrize(
    "run",
    [
        writes_constant,
        writes_view,
        writes_slice,
        copies_into_view,
        repeats,
        lambda m, x: torch.stack([m.fc(t) for t in x]),
        lambda m, x: torch.cat([m.fc(t) for t in m.fc(x).split(2, 0)]),
        lambda m, x: torch.cat([m.fc(t) for t in m.fc(x).split(4)]),  # one part of the example, two of more
        lambda m, x: torch.cat([m.fc(t) for t in m.fc(x).split(400)]),  # or of very many
        lambda m, x: torch.cat([m.fc(t) for t in (x + m.table[: x.shape[0]]).split(2)]),  # at most six rows
        lambda m, x: sum(m.fc(t) for t in torch.split(x[:, :, None].transpose(1, 2), 1, 0)),
    ],
)
def test_what_depends_on_sizes_or_leaves_something_behind_stays_an_island(run, example):
    model = Base(run).eval()
    gm = trace(model, LeafTracer(), ((ROWS[:3],), {}) if example else None)
    assert list(gm.meta["islands"]) == [""]
    for x in (ROWS[:3], ROWS, ROWS[:2]):
        torch.testing.assert_close(gm(x), model(x))


def reads_buffer(m, x):
    if m.table is not None and m.table[0, 1].item() == 1 and m.table.shape[0] == 6:
        x = x + int(m.table[1, 0])
    return m.fc(x) + m.table[: x.shape[0]]


def numbers(m, x):
    rows = int(x.shape[0] / 1)
    assert int("7") == 7 and isinstance(7, int) and not isinstance(7, float)
    return m.fc(x).view(rows, -1) * float(x.shape[-1]) ** -0.5


def ranks(m, x):
    return m.fc(x) if len(x.shape) == 2 else x


def rows_of_weights(m, x):
    return sum(part * i for i, part in enumerate(m.fc(x).unbind(1)))


@pytest.mark.parametrize("run", [reads_buffer, numbers, ranks, rows_of_weights])
def test_what_the_model_decides_is_traced(run):
    model = Base(run).eval()
    gm = trace(model, LeafTracer(), ((ROWS[:3],), {}))
    assert gm.meta["islands"] == {}
    for x in (ROWS[:3], ROWS, ROWS[:1]):
        torch.testing.assert_close(gm(x), model(x))


def test_everything_is_as_it_was_after_a_trace(caplog):
    getitem = torch.Tensor.__getitem__
    trace(Base(numbers), LeafTracer(), ((ROWS,), {}))
    island = trace(Base(lambda m, x: m.fc(x) + sum(x)), LeafTracer(), ((ROWS,), {}))
    assert island.meta["islands"]
    assert "int" not in globals() and "float" not in globals()
    assert torch.Tensor.__getitem__ is getitem and torch.Tensor.expand is torch._C.TensorBase.expand
    assert isinstance(torch.finfo, type) and nn.Module.__call__ is fx._symbolic_trace._orig_module_call
    assert not caplog.records  # whoever traces tells of islands; torch says nothing


def test_an_island_before_a_shape_keeps_its_state():
    class Counts(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("steps", torch.zeros(()))

        def forward(self, x):
            self.steps += 1
            return x * self.steps

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.counts, self.fc = Counts(), nn.Linear(4, 4)

        def forward(self, x):
            x = self.counts(x)
            return self.fc(x).view(*x.shape[:-1], 2, 2)

    gm = trace(Net().eval(), LeafTracer(), None)
    assert list(gm.meta["islands"]) == [""]  # the number of axes is not known
    gm = trace(Net().eval(), LeafTracer(), ((ROWS,), {}))
    assert list(gm.meta["islands"]) == ["counts"]
    assert type(gm.counts.steps) is Tensor
    before = float(gm.counts.steps)
    gm(ROWS)
    assert gm.counts.steps == before + 1


def test_min_of_a_dtype_follows_the_dtype():
    model = Base(lambda m, x: m.fc(x) + torch.finfo(x.dtype).min).eval()
    gm = trace(model, LeafTracer(), ((ROWS,), {}))
    assert gm.meta["islands"] == {}
    assert gm.double()(ROWS.double()).max() < -1e300
