"""trace="auto", the default: torch.export where it makes more of the model integer, and nowhere else."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import sparsebit
from models import small_net
from sparsebit.errors import TraceError
from sparsebit.quantization import QuantModel
from sparsebit.quantization.trace.auto_trace import CHOICE

X = torch.randn(4, 6, 8, generator=torch.Generator().manual_seed(0))


class ByDtype(nn.Module):
    """A layer that is looked up by the type of the values: torch.fx cannot follow that."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b, self.drop = nn.Linear(8, 8), nn.Linear(8, 8), nn.Dropout(0.5)

    def forward(self, x: Tensor) -> Tensor:
        x = {torch.float32: self.a}[x.dtype](x)
        return self.drop(self.b(x @ x.transpose(-1, -2) @ x))


class OneBatch(ByDtype):
    """torch.export unrolls the batch: its graph takes this one size only."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.stack([super(OneBatch, self).forward(sample) for sample in x])


class ByValue(ByDtype):
    """What it computes depends on the values: no front-end can follow that."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) if float(x.sum()) > -1e9 else x


def test_torch_export_is_taken_where_more_becomes_integer() -> None:
    model = ByDtype().eval()
    by_fx, auto = QuantModel(model, example=X, trace="fx"), QuantModel(model, example=X)
    assert by_fx.islands and not auto.islands and auto.front_end == "export"
    torch.testing.assert_close(auto(X), model(X))
    torch.testing.assert_close(auto(torch.cat([X, X])), model(torch.cat([X, X])))  # any batch
    longer = torch.cat([X, X], 1)
    torch.testing.assert_close(auto(longer), model(longer))  # any length
    notes = " ".join(sparsebit.preflight(model, X).notes)
    assert "torch.export" in notes and "the whole model" in notes
    totals = sparsebit.preflight(model, X).totals
    assert totals["integer_macs"] > sparsebit.preflight(model, X, trace="fx").totals["integer_macs"]


def test_an_attempt_that_fails_prints_nothing_of_torchs_own(capfd) -> None:
    """torch.export prints the whole graph where it fails: to somebody who did not ask for it."""
    assert QuantModel(ByValue().eval(), example=X).front_end == "fx"
    shown = capfd.readouterr()
    assert "def forward" not in shown.err + shown.out and "user code" not in shown.err


def test_the_report_of_a_file_says_which_front_end_and_why(tmp_path) -> None:
    pytest.importorskip("onnxruntime")
    qmodel = sparsebit.quantize(ByDtype().eval(), [X], progress=False)
    report = qmodel.export_onnx(X, str(tmp_path / "m.onnx"))
    assert any("traced by torch.export" in note for note in report.notes)


@pytest.mark.parametrize("cls, why", [(OneBatch, "the batch size"), (ByValue, "does not take")])
def test_torch_fx_stays_where_torch_export_takes_less(cls, why, caplog) -> None:
    qmodel = QuantModel(cls().eval(), example=X)
    assert qmodel.front_end == "fx" and qmodel.islands
    assert why in qmodel.model.meta[CHOICE]
    torch.testing.assert_close(qmodel(X[:2]), cls().eval()(X[:2]))


def test_there_is_no_second_trace_without_islands_or_without_an_example(monkeypatch) -> None:
    def refuse(*args: object) -> None:
        raise AssertionError("torch.export was called")

    monkeypatch.setattr("sparsebit.graph.export.from_export.run_export", refuse)
    x = torch.randn(2, 3, 8, 8)
    assert QuantModel(small_net(), example=x).front_end == "fx"
    assert CHOICE not in QuantModel(small_net(), example=x).model.meta
    assert QuantModel(ByDtype().eval()).front_end == "fx"


def test_images_of_several_sizes_keep_torch_fx() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.Conv2d(3, 4, 3)

        def forward(self, x: Tensor) -> Tensor:
            x = {torch.float32: self.conv}[x.dtype](x)
            return x * x.mean((2, 3), keepdim=True)

    small, large = torch.randn(2, 3, 8, 8), torch.randn(2, 3, 12, 12)
    assert sparsebit.quantize(Net().eval(), [small, large], progress=False).front_end == "fx"


def test_a_saved_model_remembers_its_front_end(tmp_path) -> None:
    model = ByDtype().eval()
    qmodel = sparsebit.quantize(model, [X], progress=False)
    qmodel.save(tmp_path)
    torch.testing.assert_close(QuantModel.load(tmp_path, model, example=X)(X), qmodel(X))
    with pytest.raises(TraceError, match="example=batch"):
        QuantModel.load(tmp_path, model)


def test_torch_fx_stays_where_quantizers_learn() -> None:
    """Training wants dropout, which the graph of torch.export does not have."""
    qmodel = QuantModel(ByDtype().eval(), "w4a4-qat", example=X)
    assert qmodel.front_end == "fx" and qmodel.islands
