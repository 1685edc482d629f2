"""torch.lstm, torch.gru, torch.rnn_tanh and torch.rnn_relu, as torch.export records nn.LSTM, nn.GRU and nn.RNN."""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import Tensor, fx, nn

NAMES = ("input", "hx", "params", "bias", "num_layers", "dropout", "train", "bidirectional", "batch_first")
RNNS: dict[Any, tuple[type[nn.RNNBase], dict[str, Any]]] = {
    torch.lstm: (nn.LSTM, {}),
    torch.gru: (nn.GRU, {}),
    torch.rnn_tanh: (nn.RNN, {"nonlinearity": "tanh"}),
    torch.rnn_relu: (nn.RNN, {"nonlinearity": "relu"}),
}


def read_rnn(node: fx.Node) -> dict[str, Any] | None:
    """The arguments by name; None for packed sequences, for training, and if the whole tuple has a reader."""
    values = dict(zip(NAMES, node.args))
    picked = all(u.target is operator.getitem and type(u.args[1]) is int for u in node.users)
    complete = len(values) == len(NAMES) and not node.kwargs and isinstance(values["params"], (list, tuple))
    if picked and complete and values["train"] is False:
        return values
    return None


def describe_rnn(op: Any, values: dict[str, Any], weights: list[Tensor]) -> Any:
    """(class, options, tensors by name) of the module; None if it has projections."""
    cls, options = RNNS[op]
    layers = values["num_layers"]
    bias = values["bias"]
    directions = 2 if values["bidirectional"] else 1
    if len(weights) != layers * directions * (4 if bias else 2):
        return None
    options = {**options, "input_size": weights[0].shape[1], "hidden_size": weights[1].shape[1]}
    options |= {
        name: values[name] for name in ("num_layers", "bias", "batch_first", "dropout", "bidirectional")
    }
    names: list[str] = cls(**options, device="meta")._flat_weights_names
    return cls, options, dict(zip(names, weights))


def rewire_rnn(node: fx.Node, cls: type[nn.Module], values: dict[str, Any]) -> None:
    """Set the arguments of the module. An nn.LSTM returns (out, (h, c)), torch.lstm (out, h, c)."""
    node.kwargs = {}
    if cls is not nn.LSTM:
        node.args = (values["input"], values["hx"])
        return
    node.args = (values["input"], tuple(values["hx"]))
    graph = node.graph
    late = [user for user in node.users if user.args[1] != 0]
    if late:
        with graph.inserting_after(node):
            states = graph.call_function(operator.getitem, (node, 1))
        states.meta["path"] = f"{node.meta['path']}.getitem"
        for user in late:
            index = user.args[1]
            assert isinstance(index, int)
            user.args = (states, index - 1 if index > 0 else index)
