"""LSTM for onnx2torch, which has none: forward or both directions, no peepholes, no sequence lengths."""

from __future__ import annotations

from typing import Any

import torch
from onnx2torch.node_converters.registry import add_converter
from onnx2torch.utils.common import OnnxMapping, OperationConverterResult
from torch import Tensor, nn


class OnnxLSTM(nn.Module):
    """torch's LSTM with the layout of ONNX at its first output, the only one: (steps, directions, batch, hidden)."""

    def __init__(self, lstm: nn.LSTM):
        super().__init__()
        self.lstm = lstm

    def forward(self, x: Tensor) -> tuple[Tensor]:
        y, _ = self.lstm(x)
        directions = 2 if self.lstm.bidirectional else 1
        parts = y.reshape(y.shape[0], y.shape[1], directions, self.lstm.hidden_size)
        return (parts.transpose(1, 2),)


def in_torch_order(weight: Tensor, hidden: int) -> Tensor:
    """ONNX orders the gates i o f c, torch i f c o."""
    i, o, f, c = weight.split(hidden)
    return torch.cat([i, f, c, o])


def lstm_of(w: Tensor, r: Tensor, b: Tensor) -> nn.LSTM:
    hidden = r.shape[2]
    lstm = nn.LSTM(w.shape[2], hidden, bidirectional=len(w) == 2)
    for direction in range(len(w)):
        end = "_l0_reverse" if direction else "_l0"
        values = {
            "weight_ih": w[direction],
            "weight_hh": r[direction],
            "bias_ih": b[direction, : 4 * hidden],
            "bias_hh": b[direction, 4 * hidden :],
        }
        for name, value in values.items():
            getattr(lstm, name + end).data = in_torch_order(value, hidden)
    return lstm


@add_converter(operation_type="LSTM", version=1)
@add_converter(operation_type="LSTM", version=7)
@add_converter(operation_type="LSTM", version=14)
def _(node: Any, graph: Any) -> OperationConverterResult:
    names = node.input_values
    if (len(names) > 4 and names[4]) or (len(names) > 7 and names[7]):
        raise NotImplementedError(
            f"{node.name}: only a plain LSTM is converted, without lengths and peepholes"
        )
    w, r, b = (graph.initializers[name].to_torch() for name in names[1:4])
    return OperationConverterResult(
        torch_module=OnnxLSTM(lstm_of(w, r, b)),
        onnx_mapping=OnnxMapping(inputs=names[:1], outputs=node.output_values),
    )
