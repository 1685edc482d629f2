"""Packed sequences in a QuantModel: layers around them are quantized, packing itself stays float."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pack_sequence, pad_packed_sequence

import sparsebit
from models import sqnr
from sparsebit.errors import ExportError
from sparsebit.quantization import QuantModel

CFG = {"BACKEND": "virtual", "W": {"QSCHEME": "per-channel-symmetric"}, "A": {"OBSERVER": {"TYPE": "minmax"}}}


class Tagger(nn.Module):
    def __init__(self, kind=nn.LSTM, **options):
        super().__init__()
        self.a, self.rnn = nn.Linear(6, 8), kind(8, 8, batch_first=True, **options)
        self.fc = nn.Linear(16 if self.rnn.bidirectional else 8, 3)

    def forward(self, x, lengths):
        packed = pack_padded_sequence(self.a(x), lengths.cpu(), batch_first=True, enforce_sorted=False)
        return self.fc(pad_packed_sequence(self.rnn(packed)[0], batch_first=True)[0])


class OfPacked(Tagger):
    def forward(self, x):
        out, _ = self.rnn(PackedSequence(self.a(x.data), *x[1:]))
        return out._replace(data=self.fc(out.data))


def batches():
    torch.manual_seed(0)
    return [(torch.randn(3, 5, 6), torch.tensor([3, 5, 2])), (torch.randn(2, 7, 6), torch.tensor([1, 7]))]


@pytest.mark.parametrize("asym", [False, True])
@pytest.mark.parametrize("kind, options", [(nn.LSTM, {"bidirectional": True}), (nn.GRU, {"num_layers": 2})])
def test_quantized_around_packing(kind, options, asym):
    data = batches()
    model = Tagger(kind, **options).eval()
    for example in (None, data[0]):
        qmodel = QuantModel(model, CFG, example=example).calibrate(data, asym=asym)
        assert not qmodel.islands
        assert {*qmodel.float_ops.values()} == {"pack_padded_sequence", "pad_packed_sequence"}
        with torch.no_grad():
            torch.testing.assert_close(qmodel(*data[1]), model(*data[1]))
            qmodel.set_quant(True, True)
            assert 20 < sqnr(model(*data[1]), qmodel(*data[1])) < 80


def test_packed_inputs_and_outputs():
    torch.manual_seed(0)
    pack = lambda *n: pack_sequence([torch.randn(k, 6) for k in n], enforce_sorted=False)
    model, data = OfPacked().eval(), [pack(3, 5), pack(7, 1, 2)]
    qmodel = sparsebit.quantize(model, data, CFG)
    with torch.no_grad():
        got, want = qmodel(data[1]), model(data[1])
    assert isinstance(got, PackedSequence) and torch.equal(got.batch_sizes, want.batch_sizes)
    assert 20 < sqnr(want.data, got.data) < 80


def test_the_export_says_what_it_cannot(tmp_path):
    pytest.importorskip("onnxscript")
    data = batches()
    qmodel = sparsebit.quantize(Tagger().eval(), data, CFG)
    with pytest.raises(ExportError, match=r"packed sequences in rnn(.|\n)*fix: .*padded tensor"):
        qmodel.export_onnx(data[0], str(tmp_path / "model.onnx"))
