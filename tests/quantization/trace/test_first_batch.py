"""Models without an example: the first batch shows which optional inputs are used."""

from __future__ import annotations

import logging

import pytest
import torch
from torch import nn

from sparsebit.errors import TraceError
from sparsebit.graph.run import calls
from sparsebit.graph.run.calls import Call
from sparsebit.graph.run.signature import signature_of
from sparsebit.quantization import QuantModel

X, Y = torch.randn(3, 4), torch.randn(3, 4)


class Optional(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x, y=None, negate=False):
        out = self.a(x)
        if y is not None:
            out = out + self.b(y)
        return -out if negate else out


class AllOptional(Optional):
    def forward(self, x=None, y=None):
        return super().forward(x, y)


class OneOfTwo(nn.Module):
    """As the models of transformers: no trace without an example can succeed."""

    def __init__(self):
        super().__init__()
        self.table, self.fc = nn.Embedding(10, 4), nn.Linear(4, 2)

    def forward(self, ids=None, embedded=None):
        if (ids is None) == (embedded is None):
            raise ValueError("give one of ids and embedded")
        return self.fc(self.table(ids) if embedded is None else embedded)


class Unread(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(4, 2)

    def forward(self, metas, x, more, *, flag):
        return self.fc(x)


CALLS = {
    "given": (Optional, (X, Y), {}),
    "by name": (Optional, (), {"x": X, "y": Y}),
    "left out": (Optional, (X,), {}),
    "a flag": (Optional, (X,), {"negate": True}),
    "all given": (AllOptional, (X, Y), {}),
    "first of all": (AllOptional, (X,), {}),
    "ids": (OneOfTwo, (torch.tensor([[1, 2]]),), {}),
    "embedded": (OneOfTwo, (), {"embedded": X}),
}


@pytest.mark.parametrize("name", CALLS)
def test_the_first_batch_decides(name):
    kind, args, kwargs = CALLS[name]
    model = kind()
    qmodel = QuantModel(model)
    parameters = {id(p) for p in qmodel.parameters()}
    torch.testing.assert_close(qmodel(*args, **kwargs), model(*args, **kwargs))
    now = {id(p) for p in qmodel.parameters()}
    assert parameters <= now or now <= parameters  # an optimizer that was built before still has them
    assert not qmodel.islands
    qmodel.calibrate([Call(args, kwargs)])
    qmodel.set_quant(True, True)
    error = (qmodel(*args, **kwargs) - model(*args, **kwargs)).abs().max()
    assert 0 < error < 0.1


def test_a_calibration_goes_on_with_the_new_graph():
    model = Optional()
    qmodel = QuantModel(model)
    qmodel.prepare_calibration()
    for scale in (1, 3):
        qmodel(scale * X, scale * Y)
    qmodel.calc_qparams(asym=True)
    b = qmodel.model.b.input_quantizer
    assert float(b.observer.max_val) == pytest.approx(float(3 * Y.max()))


def test_settings_of_quantizers_stay():
    qmodel = QuantModel(Optional())
    qmodel.model.a.weight_quantizer.set_bit(4)
    qmodel.model.a.input_quantizer.set_fake_fused()
    qmodel(X, Y)
    assert qmodel.model.a.weight_quantizer.bit == 4
    assert qmodel.model.a.input_quantizer.absorbed
    assert qmodel.model.b.weight_quantizer.bit == 8


def test_a_later_batch_of_another_kind_is_refused():
    qmodel = QuantModel(Optional())
    qmodel(X)
    with pytest.raises(TraceError, match="traced with y=None"):
        qmodel(X, Y)


def test_loaded_weights_stay():
    """Weights that were written before the first batch belong to the graph as it is."""
    state = {
        k: v + 1 for k, v in QuantModel(Optional()).state_dict().items() if k.endswith(("weight", "bias"))
    }
    qmodel = QuantModel(Optional())
    qmodel.load_state_dict(state, strict=False)
    qmodel(X)
    torch.testing.assert_close(qmodel.model.a.weight.detach(), state["model.a.weight"])
    with pytest.raises(TraceError, match="example=batch"):
        qmodel(X, Y)


def test_train_and_eval_stay():
    qmodel = QuantModel(Optional().eval())
    qmodel.train()
    qmodel(X, Y)
    assert qmodel.training and qmodel.model.b.training


@pytest.mark.parametrize(
    "args, kwargs",
    [
        ((X,), {}),
        ((), {"x": X}),
        ((None, X, None), {"flag": 1}),
        (("anything", X), {"more": 3, "flag": 1}),
    ],
)
def test_inputs_that_nobody_reads_may_be_left_out(args, kwargs):
    model = Unread()
    qmodel = QuantModel(model)
    torch.testing.assert_close(qmodel(*args, **kwargs), model(None, X, None, flag=None))


def test_what_is_read_is_still_required():
    with pytest.raises(TypeError, match="missing"):
        QuantModel(Unread())(metas=None)


def test_a_subclass_overrides_one_step():
    """The five steps run in the order of the original, each for the graph that the step before it left."""
    seen = []

    class Own(QuantModel):
        def _trace(self, model):
            seen.append("trace")
            return super()._trace(model)

        def _run_simplifiers(self):
            seen.append("simplify")
            super()._run_simplifiers()

        def _convert2quantmodule(self):
            seen.append("convert")
            super()._convert2quantmodule()
            seen.append(type(self.model.a).__name__)

        def _build_quantizer(self):
            seen.append("build")
            super()._build_quantizer()
            self.model.a.weight_quantizer.set_bit(3)

        def _run_fuse_operations(self):
            seen.append("fuse")
            super()._run_fuse_operations()

    qmodel = Own(Optional())
    assert seen == ["trace", "simplify", "convert", "QLinear", "build", "fuse"]
    assert qmodel.model.a.weight_quantizer.bit == 3
    qmodel(X, Y)  # the same steps again, with the first batch as the example
    assert qmodel.model.a.weight_quantizer.bit == 3
    assert len(seen) == 12


# -- (x, mask) looks like (x, target) ---------------------------------------------------------------------------
class Masked(nn.Module):
    """The names are those of no other model here: a remark is made once per kind of batch."""

    def forward(self, picture, silence=None):
        return picture if silence is None else picture * silence


SAID = (
    "batches: of each tuple of 2, the first is taken for the inputs (picture) and the rest for targets. If silence is "
    'meant, give mappings with the keys "picture", "silence"'
)


@pytest.mark.parametrize(("second", "level"), [
    (torch.ones(3, 4), "WARNING"),
    (torch.ones(3, 4, dtype=torch.long), "WARNING"),
    (torch.tensor([0, 1, 2]), "INFO"),  # classes, as every DataLoader gives them
])  # fmt: skip
def test_what_is_left_of_a_tuple_is_said_once(second, level, caplog):
    calls._report_once.cache_clear()
    caplog.set_level(logging.INFO, "sparsebit")
    for _ in range(3):
        args, _ = calls.Call.of((X, second), signature_of(Masked()))
        assert args == (X,)
    assert [(r.levelname, r.getMessage()) for r in caplog.records] == [(level, SAID)]


@pytest.mark.parametrize("batch", [(X,), (X, Y), {"picture": X, "silence": Y}, X])
def test_nothing_is_said_where_nothing_is_unclear(batch, caplog):
    calls._report_once.cache_clear()
    caplog.set_level(logging.INFO, "sparsebit")
    model = nn.Linear(4, 4) if isinstance(batch, tuple) and len(batch) == 2 else Masked()
    calls.Call.of(batch, signature_of(model))
    assert not caplog.records
