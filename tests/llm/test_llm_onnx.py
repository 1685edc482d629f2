"""Quantized linears in ONNX: onnxruntime computes what we compute, on the fused operator."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from test_walk import tiny, tokens

from sparsebit import llm
from sparsebit.errors import ExportError
from sparsebit.llm.onnx import layer_to_onnx, to_onnx
from sparsebit.numeric.solvers.rtn import rtn
from sparsebit.numeric.spec import QuantSpec

onnx = pytest.importorskip("onnx")
ort = pytest.importorskip("onnxruntime")


def run(path, feeds, tmp_path):
    """Outputs, and the operators after onnxruntime's fusions."""
    options = ort.SessionOptions()
    options.intra_op_num_threads = 1
    options.add_session_config_entry(
        "session.qdq_matmulnbits_accuracy_level", "1"
    )  # 4, the default: int8 inputs
    options.optimized_model_filepath = str(tmp_path / "optimized.onnx")
    session = ort.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    out = session.run(None, feeds)[0]
    nodes = onnx.load(str(tmp_path / "optimized.onnx"), load_external_data=False).graph.node
    return torch.from_numpy(out), [node.op_type for node in nodes]


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize(
    ("bits", "symmetric", "group"), [(4, True, 32), (4, False, 32), (4, False, 16), (8, True, 32)]
)
def test_one_layer(tmp_path, bits, symmetric, group, bias):
    weight = torch.randn(48, 64)
    layer = llm.QuantLinear(
        rtn(weight, None, QuantSpec(bits, symmetric, 0, group=group)), torch.randn(48) if bias else None
    )
    layer_to_onnx(layer, tmp_path / "layer.onnx")
    x = torch.randn(20, 64)
    found, operators = run(tmp_path / "layer.onnx", {"x": x.numpy()}, tmp_path)
    expected = x @ layer.quantized().dequantize().T + (layer.bias if bias else 0)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    if bits == 4:
        assert "MatMulNBits" in operators and "DequantizeLinear" not in operators


def test_whole_rows_and_what_does_not_fit(tmp_path):
    q = rtn(torch.randn(6, 12), None, QuantSpec(4, True, 0))
    layer = llm.QuantLinear(q)
    layer_to_onnx(layer, tmp_path / "rows.onnx")
    x = torch.randn(3, 12)
    found, _ = run(tmp_path / "rows.onnx", {"x": x.numpy()}, tmp_path)
    torch.testing.assert_close(found, x @ q.dequantize().T, rtol=1e-4, atol=1e-4)
    for spec in (QuantSpec(3, True, 0), QuantSpec(4, True, 0, group=8)):
        with pytest.raises(ExportError, match="full groups in order"):
            layer_to_onnx(llm.QuantLinear(rtn(torch.randn(6, 12), None, spec)))


@pytest.mark.filterwarnings("ignore")
def test_a_whole_model(tmp_path):
    torch.manual_seed(0)
    from test_rotate import WithLayerNorm
    from torch import nn

    model = WithLayerNorm(nn.LayerNorm(16)).eval()
    llm.quantize(model, save=tmp_path / "out", method="rtn", group_size=16)
    loaded, ids = llm.load(tmp_path / "out", model), tokens()[0]
    to_onnx(loaded, ids, tmp_path / "model.onnx")
    found, operators = run(tmp_path / "model.onnx", {"tokens": ids.numpy()}, tmp_path)
    with torch.no_grad():
        plain = loaded(ids)
    torch.testing.assert_close(found, plain, rtol=1e-3, atol=1e-3)
    assert operators.count("MatMulNBits") == 4
    with pytest.raises(ExportError, match="no QuantLinear"):
        to_onnx(tiny(), ids, tmp_path / "x.onnx")
    names = {t.name for t in onnx.load(str(tmp_path / "model.onnx")).graph.initializer}
    assert sum(n.endswith("_codes") for n in names) == 4
    sizes = [
        int(np.prod(t.dims))
        for t in onnx.load(str(tmp_path / "model.onnx")).graph.initializer
        if t.data_type == 1
    ]
    assert 16 * 32 not in sizes  # no float copy is left
