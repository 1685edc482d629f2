"""Graphs as people write them: what the tracer takes, what becomes an island, and that the output stays."""

from __future__ import annotations

import functools
import importlib.util
import sys
import threading
from collections import OrderedDict, namedtuple
from dataclasses import dataclass

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torch.utils.checkpoint import CheckpointFunction, checkpoint

from models import Checks
from sparsebit.errors import TraceError
from sparsebit.graph.trace.from_module import trace
from sparsebit.graph.trace.guards import guard_inputs
from sparsebit.graph.trace.tracer import LeafTracer

X = torch.linspace(-1, 1, 12).reshape(3, 4)


def traced(model: nn.Module, *args, example=True, **kwargs) -> fx.GraphModule:
    """The graph of `model`; its output is checked against the model's, types included."""
    model.eval()
    call = (args, kwargs) if example else None
    gm = trace(model, LeafTracer(), call)
    assert_same(gm(*args, **kwargs), model(*args, **kwargs))
    return gm


def assert_same(a, b) -> None:
    assert type(a) is type(b)
    if isinstance(a, Tensor):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-6)
    elif isinstance(a, dict):
        assert list(a) == list(b)
        for key in a:
            assert_same(a[key], b[key])
    elif isinstance(a, (list, tuple)):
        assert len(a) == len(b)
        for x, y in zip(a, b):
            assert_same(x, y)
    elif hasattr(a, "__dataclass_fields__"):
        assert_same(vars(a), vars(b))
    else:
        assert a == b


class Fc(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.fc = nn.Linear(4, 4)


class DataDependent(Fc):
    def forward(self, x):
        if x.sum() > 1000:
            return x
        return self.fc(x)


class Holder(Fc):
    """A traceable model around one part."""

    def __init__(self, part: nn.Module):
        super().__init__()
        self.part = part

    def forward(self, x):
        return F.relu(self.fc(self.part(x))) + x


# -- islands ---------------------------------------------------------------------------------------------
def test_an_untraceable_part_becomes_an_island_and_the_rest_is_traced():
    gm = traced(Holder(DataDependent()), X)
    assert list(gm.meta["islands"]) == ["part"]
    found = gm.meta["islands"]["part"]
    assert "control flow" in found.error and "x.sum() > 1000" in found.line and "test_trace.py" in found.line
    targets = [n.target for n in gm.graph.nodes if n.op == "call_module"]
    assert targets == ["part", "fc"]


def test_the_innermost_module_is_the_island():
    gm = traced(Holder(Holder(Holder(DataDependent()))), X)
    assert list(gm.meta["islands"]) == ["part.part.part"]
    assert [n.target for n in gm.graph.nodes if n.op == "call_module"] == [
        "part.part.part",
        "part.part.fc",
        "part.fc",
        "fc",
    ]


def test_a_parent_that_needs_the_value_of_an_island_becomes_one_itself():
    class Parent(Fc):
        def __init__(self):
            super().__init__()
            self.part = DataDependent()

        def forward(self, x):
            return x if self.part(x).max() > 1000 else self.fc(x)

    gm = traced(Holder(Parent()), X)
    assert list(gm.meta["islands"]) == ["part"]  # not part.part, which is inside


def test_a_root_that_cannot_be_traced_stays_whole():
    gm = traced(DataDependent(), X)
    assert list(gm.meta["islands"]) == [""]
    assert_same(gm(x=X), DataDependent()(X))  # by keyword too


def test_node_names_are_those_of_a_clean_trace():
    names = [n.name for n in traced(Holder(DataDependent()), X).graph.nodes]
    assert names == ["x", "part", "fc", "relu", "add", "output"]


def test_an_island_does_not_keep_what_the_failed_trace_left_behind():
    class Counts(Fc):
        def forward(self, x):
            self.seen = x  # a proxy, during the trace
            return self.fc(x) if x.sum() < 1000 else x

    gm = traced(Holder(Counts()), X)
    assert isinstance(gm.part.seen, Tensor)


def test_a_buffer_updated_in_forward_makes_an_island_that_goes_on_updating():
    class Counter(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("steps", torch.zeros(()))

        def forward(self, x):
            self.steps += 1
            return x * self.steps

    model = Holder(Counter()).eval()
    gm = trace(model, LeafTracer())
    assert "updates its buffer 'steps'" in gm.meta["islands"]["part"].error
    assert gm.part.steps == 0 and model.part.steps == 0
    gm(X), gm(X)
    assert gm.part.steps == 2 and model.part.steps == 0


def test_a_graph_that_computes_something_else_is_not_used():
    class Sneaky(Fc):
        def forward(self, x):
            return (
                self.fc(x) if isinstance(x, Tensor) else x
            )  # a proxy is not a Tensor: the wrong branch is traced

    gm = traced(Sneaky(), X)
    assert "another output" in gm.meta["islands"][""].error


# -- code as people write it -----------------------------------------------------------------------------
class Factories(Fc):
    def forward(self, x):
        n, c = x.shape
        ones = torch.ones(n, c, dtype=x.dtype, device=x.device)
        return self.fc(x) + torch.arange(n, device=x.device).unsqueeze(1) + ones + torch.zeros((n, c))


class KeepsForLooking(Fc):
    def forward(self, x):
        self.features = self.fc(x)
        return self.features * 2


class NestedParameter(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = Holder(nn.Identity())
        self.table = nn.Parameter(torch.ones(4))

    def forward(self, x):
        return F.linear(x, self.inner.fc.weight) * self.table + self.inner.fc.bias


class Checkpointed(Fc):
    def forward(self, x):
        return checkpoint(self.fc, x, use_reentrant=False) + checkpoint(self.fc, x, use_reentrant=True)


class BufferFirst(Fc):
    def __init__(self):
        super().__init__()
        self.register_buffer("table", torch.arange(12.0).reshape(3, 4))

    def forward(self, x):
        index = torch.argmax(x, 1) % 3
        return self.table[index] + self.fc(x) + (self.table - x) * (1 - x) / (2 + x**2)


class SetItem(Fc):
    def forward(self, x):
        y = self.fc(x)
        y[:, 0] = 0
        return y + 1


class UnusedInput(Fc):
    def forward(self, x, unused=None, *, also_unused=3):
        return self.fc(x)


@pytest.mark.parametrize(
    "model",
    [
        Checks(),
        Factories(),
        KeepsForLooking(),
        NestedParameter(),
        Checkpointed(),
        BufferFirst(),
        SetItem(),
        UnusedInput(),
    ],
    ids=lambda m: type(m).__name__,
)
@pytest.mark.parametrize("example", [True, False])
def test_is_traced_without_islands(model, example):
    gm = traced(model, X, example=example)
    assert gm.meta["islands"] == {}
    assert_same(gm(X[:1]), model(X[:1]))  # the batch size is not baked in


def test_no_grad_block_stays_without_gradient():
    class Net(Fc):
        def __init__(self):
            super().__init__()
            self.head = nn.Linear(4, 1)

        def forward(self, x):
            with torch.no_grad():
                x = self.fc(x).relu()
            return self.head(x)

    gm = traced(Net(), X)
    gm(X).sum().backward()
    assert gm.fc.weight.grad is None and gm.head.weight.grad is not None
    assert torch.is_grad_enabled()
    with torch.no_grad():
        gm(X)
        assert not torch.is_grad_enabled()


class Lists(nn.Module):
    def forward(self, xs, *more):
        nested = [y for pair in more for y in pair]
        return sum(xs) + sum(nested) if nested else sum(xs)


@pytest.mark.parametrize("kind", [list, tuple])
def test_lists_of_another_length_are_refused(kind):
    """What is too much would be ignored."""
    x = [torch.full((2,), float(i)) for i in range(4)]
    gm = trace(Lists(), LeafTracer(), ((kind(x[:2]), kind(x[1:3])), {}))
    assert not gm.meta["islands"] and torch.equal(gm(kind(x[:2]), kind(x[2:])), x[0] + x[1] + x[2] + x[3])
    with pytest.raises(TraceError, match=r"forward\(xs=...\): has 3 items, and the model was traced with 2"):
        gm(kind(x[:3]), kind(x[:2]))
    for more in ([kind(x[:3])], [kind(x[:2]), kind(x[:2])]):
        with pytest.raises(TraceError, match="items, and the model was traced with"):
            gm(kind(x[:2]), *more)


class Counts(nn.Module):
    def forward(self, xs, unused=None):
        return torch.nn.utils.rnn.pad_sequence(xs, batch_first=True).sum(0) / len(xs)


def test_the_length_of_a_list_is_no_constant():
    x = [torch.ones(i) for i in (1, 2, 3, 4)]
    gm = trace(Counts(), LeafTracer(), ((x[:2], x[:1]), {}))
    torch.testing.assert_close(gm(x[2:], x), Counts()(x[2:]))  # nobody counts the other one
    torch.testing.assert_close(gm(x, x), Counts()(x))
    assert "pads sequences" in gm.meta["islands"][""].error  # and so it stays whole


class Asks(nn.Module):
    """`isinstance` or `type` of a list of numbers."""

    def __init__(self, exact):
        super().__init__()
        self.exact = exact

    def forward(self, x, size):
        if type(size) is list if self.exact else isinstance(size, list):
            x = x[..., : size[0]]
        return x.sum()


@pytest.mark.parametrize("exact", [False, True])
def test_a_list_of_numbers_is_a_list(exact):
    """On the example both branches give the same."""
    x = torch.arange(8.0)
    gm = trace(Asks(exact), LeafTracer(), ((x, [7]), {}))
    assert not gm.meta["islands"] and float(gm(x, [7])) == 21
    assert ("size" in gm.meta["fixed"]) is exact  # then another value is refused by whoever runs the graph
    assert exact or float(gm(x, [4])) == 6


def test_an_import_in_another_thread_and_one_that_is_late(tmp_path, monkeypatch):
    (tmp_path / "slowly.py").write_text("import time; time.sleep(0.5)\nfrom torch import arange\n")
    (tmp_path / "lazily.py").write_text("from torch import arange\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    late = []

    class Imports(nn.Module):
        def forward(self, x):
            thread = threading.Thread(target=importlib.import_module, args=("slowly",))
            thread.start()
            spec = importlib.util.find_spec("lazily")
            assert "arange" in spec.loader.get_source("lazily")
            late.append((thread, spec))
            return x * 2

    kept = torch.arange, torch.Tensor.__getitem__, CheckpointFunction.apply.__func__
    gm = trace(Imports(), LeafTracer())
    for thread, _ in late:
        thread.join()
    spec = late[-1][1]
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert not gm.meta["islands"] and module.arange is torch.arange
    assert (torch.arange, torch.Tensor.__getitem__, CheckpointFunction.apply.__func__) == kept
    sys.modules.pop("slowly")


def test_two_threads_trace_one_after_the_other():
    kept, found = torch.arange, []
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2))
    go = lambda: found.append(len(trace(model, LeafTracer()).graph.nodes))
    threads = [threading.Thread(target=go) for _ in range(4)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    assert found == [5] * 4 and torch.arange is kept


def test_what_is_imported_meanwhile_sees_torch_as_it_is(tmp_path, monkeypatch):
    """torch.utils.checkpoint imports torch._dynamo, which keeps torch.finfo: a wrapper there breaks torch.compile."""
    inside = "from torch import Tensor, arange, finfo\nget = Tensor.__getitem__\n"
    (tmp_path / "late.py").write_text(f"import later\n{inside}")
    (tmp_path / "later.py").write_text(inside)
    monkeypatch.syspath_prepend(str(tmp_path))

    class Imports(nn.Module):
        def forward(self, x):
            import late

            return x[:, : late.arange(x.shape[1]).shape[0]] * torch.finfo(x.dtype).eps

    before, kept = list(sys.meta_path), (torch.Tensor, torch.arange, torch.finfo, torch.Tensor.__getitem__)
    gm = trace(Imports(), LeafTracer())
    assert not gm.meta["islands"] and sys.meta_path == before
    for name in ("late", "later"):
        module = sys.modules.pop(name)
        assert (module.Tensor, module.arange, module.finfo, module.get) == kept
    assert "finfo" in str(gm.graph) and gm(torch.ones(2, 3)).shape == (2, 3)


def test_checkpointed_part_has_gradients():
    gm = traced(Checkpointed(), X)
    gm(X).sum().backward()
    model = Checkpointed()
    (model.fc(X) + model.fc(X)).sum().backward()
    torch.testing.assert_close(gm.fc.weight.grad, model.fc.weight.grad)


# -- inputs and outputs ----------------------------------------------------------------------------------
class Optional(Fc):
    def forward(self, x, mask=None, *, scale: float = 1.0, twice=False):
        x = self.fc(x) * scale
        if mask is not None:
            x = x * mask
        return x + x if twice else x


def test_optional_inputs_follow_the_example():
    mask = torch.tensor([1.0, 0, 1, 0])
    assert [n.name for n in traced(Optional(), X).graph.nodes][:2] == ["x", "mask"]
    gm = traced(Optional(), X, mask, scale=2.0, twice=True)
    assert gm.meta["fixed"] == {"twice": True}
    assert_same(gm(X, mask, scale=3.0), Optional()(X, mask, scale=3.0, twice=True))  # a number stays an input
    gm = traced(Optional(), X, mask=mask)
    assert_same(gm(X, mask=mask * 2), Optional()(X, mask=mask * 2))


def test_a_number_that_control_flow_needs_is_a_constant():
    class Repeats(Fc):
        def forward(self, x, times: int = 2):
            for _ in range(times):
                x = self.fc(x)
            return x

    gm = traced(Repeats(), X)
    assert gm.meta["fixed"] == {"times": 2} and gm.meta["islands"] == {}
    assert traced(Repeats(), X, 3).meta["fixed"] == {"times": 3}


def test_an_example_that_does_not_fit_is_refused():
    with pytest.raises(TraceError, match="does not fit forward"):
        trace(Optional(), LeafTracer(), ((X, X, X), {}))


@dataclass
class Pair:
    first: Tensor
    second: Tensor | None = None


Point = namedtuple("Point", "a b")


class ManyInputs(Fc):
    """Iterates over lists, unpacks dicts, reads attributes."""

    def forward(self, xs, named, pair, point):
        total = sum(self.fc(x) for x in xs)
        for key, value in named.items():
            total = total + value if key != "skip" else total
        return total + pair.first + point.a - point.b


def test_lists_dicts_dataclasses_and_named_tuples_come_in():
    inputs = ([X, X + 1], {"a": X, "skip": X * 9}, Pair(X), Point(X, X * 2))
    gm = traced(ManyInputs(), *inputs)
    assert gm.meta["islands"] == {}
    other = ([X * 2, X], {"a": -X, "skip": X}, Pair(X * 3), Point(X * 4, X))
    assert_same(gm(*other), ManyInputs()(*other))


@pytest.mark.parametrize(
    "call",
    [
        lambda x: torch.max(x, 1),
        lambda x: x.min(dim=-1),
        lambda x: x.median(dim=0),
        lambda x: torch.topk(x, k=2),
        lambda x: x.sort(descending=True),
        lambda x: torch.var_mean(x, dim=1),
    ],
)
def test_pairs_are_unpacked_without_an_example(call):
    class Net(Fc):
        def forward(self, x):
            values, places = call(self.fc(x))
            return values, places

    net = Net()
    gm = trace(net, LeafTracer())
    assert gm.meta["islands"] == {}
    assert_same(gm(X), net(X))


class ModelOutputLike(OrderedDict):
    pass


@pytest.mark.parametrize(
    "make",
    [
        lambda y: [y, (y + 1, {"k": y * 2})],
        lambda y: Pair(y, y + 1),
        lambda y: Point(y, y * 2),
        lambda y: OrderedDict(a=y, b=y + 1),
        lambda y: ModelOutputLike(a=y),
        lambda y: {"y": y, "n": 3, "none": None},
    ],
    ids=["list", "dataclass", "named tuple", "OrderedDict", "subclass", "dict"],
)
def test_structured_outputs_keep_their_type(make):
    class Net(Fc):
        def forward(self, x):
            return make(self.fc(x))

    assert traced(Net(), X).meta["islands"] == {}


def test_wrapped_functions_are_looked_into():
    traced(UsesWrapped(), X)  # and a second trace works as the first
    gm = traced(UsesWrapped(), X)
    assert [n.name for n in gm.graph.nodes] == ["x", "fc_weight", "linear", "odd", "output"]


@fx.wrap
def wrapped_linear(x, weight):
    return F.linear(x, weight)


@fx.wrap
def odd(x):
    return x * 2 if x.sum() > 0 else x


class UsesWrapped(Fc):
    def forward(self, x):
        return odd(wrapped_linear(x, self.fc.weight))


def test_the_model_is_never_touched():
    model = Holder(DataDependent())
    before = {k: v.clone() for k, v in model.state_dict().items()}
    keys = {name: set(vars(m)) for name, m in model.named_modules()}
    trace(model, LeafTracer(), ((X,), {}))
    assert model.training and model.part.training
    assert {name: set(vars(m)) for name, m in model.named_modules()} == keys
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())
    assert torch.arange is torch._C._VariableFunctions.arange  # torch is as it was


def settled(forward):
    """Sees to defaults, as decorators of published models do."""

    @functools.wraps(forward)
    def wrapper(self, *args, **kwargs):
        flag = kwargs.pop("flag", None)
        out = forward(self, *args, flag=True if flag is None else flag, **kwargs)
        return (out,) if flag is False else out

    return wrapper


class Decorated(Fc):
    @settled
    def forward(self, x, y=None, flag=None, **more):
        assert flag is not None
        return self.fc(x) + (0 if y is None else y) + more.get("z", 0)


class DecoratedByName(Fc):
    @settled
    def forward(self, x, *, y=None, flag=None):
        return self.fc(x) if y is None else self.fc(x) * y


@pytest.mark.parametrize("net", [Decorated, DecoratedByName])
@pytest.mark.parametrize(
    "args, kwargs", [((X,), {}), ((), {"x": X, "y": X}), ((X,), {"y": X, "flag": False}), ((X,), {"z": X})]
)
def test_a_decorated_forward_is_called_as_the_example_calls_it(net, args, kwargs):
    if "z" in kwargs and net is DecoratedByName:
        kwargs = {"y": X}
    model = net().eval()
    gm = trace(model, LeafTracer(), (args, kwargs))
    assert gm.meta["islands"] == {}
    args, kwargs = tuple(2 * x for x in args), {k: v if v is False else v - 1 for k, v in kwargs.items()}
    assert_same(gm(*args, **kwargs), model(*args, **kwargs))


class Scales(Fc):
    @torch.no_grad()
    def forward(self, x, scale=2.0):
        return self.fc(x) * scale


class Keywords(Fc):
    @torch.no_grad()
    def forward(self, x, *more, scale=2.0):
        return self.fc(x) * scale + sum(more)


@pytest.mark.parametrize("example", [None, ((X,), {})])
def test_what_the_example_does_not_say_counts_or_is_refused(example):
    gm = trace(Scales().eval(), LeafTracer(), example)
    assert_same(gm(X, scale=30.0), Scales().eval()(X, scale=30.0))
    gm = trace(Keywords().eval(), LeafTracer(), example)
    guard_inputs(gm, gm.meta["fixed"])
    assert_same(gm(X), Keywords().eval()(X))
    for call in (lambda: gm(X, scale=3.0), lambda: gm(X, X)):
        with pytest.raises(TraceError, match="was traced with"):
            call()


class Named(Fc):
    """An input called like an op that gives pairs."""

    def forward(self, sort):
        total = 0
        for row in sort:
            total = total + row
        return self.fc(sort).sum(0) + total


def test_names_of_inputs_say_nothing():
    gm = trace(Named().eval(), LeafTracer())
    assert_same(gm(X), Named().eval()(X))


@pytest.mark.parametrize("net", [Decorated, DecoratedByName])
def test_a_decorated_forward_needs_no_example(net):
    model = net().eval()
    gm = trace(model, LeafTracer())
    assert gm.meta["islands"] == {}
    assert_same(gm(X), model(X))


def test_tracing_leaves_tensors_what_they_were():
    """A class that once had `__getitem__` replaced counts as a sequence for ever: this list failed afterwards."""

    class Sliced(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("table", torch.randn(1, 8, 4))

        def forward(self, x):
            return x + self.table[:, : x.shape[1]]

    gm = trace(Sliced(), LeafTracer())
    assert torch.tensor([torch.tensor(1), torch.tensor(2)]).tolist() == [1, 2]
    x = torch.randn(2, 5, 4)
    assert torch.equal(gm(x), x + gm.table[:, :5])


def test_islands_of_one_reason_are_one_line(caplog):
    from sparsebit.graph.islands import Island, warn_of

    line = "net.py:3: return " + "x + " * 40 + "x"
    found = {f"layers.{i}": Island(f"layers.{i}", "TraceError: control flow", line) for i in range(49)}
    warn_of({**found, "head": Island("head", "TypeError: other", "")})
    first, second = (record.getMessage() for record in caplog.records)
    assert "layers.0, layers.1 and 47 more: TraceError" in first and len(first) < 250
    assert second.endswith("head: TypeError: other")
