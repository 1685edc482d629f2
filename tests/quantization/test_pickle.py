"""A QuantModel as an ordinary object: pickle, torch.save, copies, the signature of its forward."""

from __future__ import annotations

import copy
import inspect
import io
import pickle

import pytest
import torch
from torch import Tensor, nn

import sparsebit
from models import images, small_net

X = images(1)[0]


def pickled(model):
    return pickle.loads(pickle.dumps(model))


def saved(model):
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


class Tokens(nn.Module):
    """The forward of a language model, more or less."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(11, 8), nn.Linear(8, 11)

    def forward(self, input_ids: Tensor, scale: float = 1.0, labels: Tensor | None = None) -> Tensor:
        return self.head(self.embed(input_ids) * scale)


@pytest.mark.parametrize("again", [pickled, saved, copy.deepcopy], ids=["pickle", "torch.save", "deepcopy"])
@pytest.mark.parametrize("trace", ["fx", "export"])
def test_pickle_of_a_quantmodel_raised_key_error_fixed(again, trace):
    qmodel = sparsebit.quantize(small_net(), [X], trace=trace, progress=False)
    other = again(qmodel)
    assert torch.equal(other(X), qmodel(X))
    assert other.preflight(X).totals == qmodel.preflight(X).totals
    assert [n.meta.get("path") for n in other.model.graph.nodes] == [
        n.meta.get("path") for n in qmodel.model.graph.nodes
    ]
    with torch.no_grad():
        other.model.get_parameter(
            "fc.weight" if trace == "fx" else next(iter(dict(other.model.named_parameters())))
        ).zero_()
    assert not torch.equal(other(X), qmodel(X))  # nothing is shared


def test_a_pickled_model_exports_and_calibrates(tmp_path):
    pytest.importorskip("onnxruntime")
    other = pickled(sparsebit.quantize(small_net(), [X], progress=False))
    assert other.export_onnx(X, str(tmp_path / "m.onnx")).ok
    other.calibrate([2 * X], progress=False).set_quant(True, True)
    assert other(X).isfinite().all()


def test_a_deep_model_pickles():
    qmodel = sparsebit.QuantModel(small_net(blocks=60))
    assert len(pickled(qmodel).model.graph.nodes) == len(qmodel.model.graph.nodes)


@pytest.mark.parametrize("again", [lambda m: m, pickled, copy.deepcopy], ids=["itself", "pickle", "deepcopy"])
def test_a_quantmodel_hid_the_signature_of_the_forward_from_trainer(again):
    ids = torch.arange(6).reshape(2, 3)
    qmodel = again(sparsebit.quantize(Tokens().eval(), [ids], progress=False))
    takes = inspect.signature(qmodel.forward)
    assert list(takes.parameters) == ["input_ids", "scale", "labels"]
    assert takes.parameters["scale"].default == 1.0
    assert qmodel(input_ids=ids).shape == (2, 3, 11)


def test_a_forward_of_a_subclass_keeps_its_own_signature():
    class Own(sparsebit.QuantModel):
        def forward(self, x: Tensor, twice: bool = False) -> Tensor:
            out = super().forward(x)
            return 2 * out if twice else out

    model = Own(small_net())
    assert list(inspect.signature(model.forward).parameters) == ["x", "twice"]
    torch.testing.assert_close(model(X, twice=True), 2 * model(X))
