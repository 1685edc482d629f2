"""StepByStep: LSTM, GRU and RNN as a loop over time, with the hidden state rounded before it is multiplied.

torch's own modules check their arguments, pack, sort and then call one function (`torch.lstm(...)`). Inside the block
that function is computed here instead. Rounded is what meets a weight; the gates work with the float state.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

Round = Callable[[Tensor], Tensor]
State = tuple[Tensor, ...]  # (h,) or, of an LSTM, (h, c)
Cell = Callable[[Tensor, Tensor, State], State]  # (part of the input, part of the state, state) -> new state


class Options(NamedTuple):
    """The last arguments of torch.lstm and its relatives, in their order."""

    bias: bool
    layers: int
    dropout: float
    training: bool
    bidirectional: bool


class Weights(NamedTuple):
    """The weights of one layer in one direction."""

    w_ih: Tensor
    w_hh: Tensor
    b_ih: Tensor | None
    b_hh: Tensor | None
    w_hr: Tensor | None  # projects the state


def lstm_cell(x: Tensor, h: Tensor, state: State) -> State:
    i, f, g, o = (x + h).chunk(4, -1)
    c = f.sigmoid() * state[1] + i.sigmoid() * g.tanh()
    return o.sigmoid() * c.tanh(), c


def gru_cell(x: Tensor, h: Tensor, state: State) -> State:
    x_r, x_z, x_n = x.chunk(3, -1)
    h_r, h_z, h_n = h.chunk(3, -1)
    keep = (x_z + h_z).sigmoid()
    new = (x_n + (x_r + h_r).sigmoid() * h_n).tanh()
    return (new + keep * (state[0] - new),)


def tanh_cell(x: Tensor, h: Tensor, state: State) -> State:
    return ((x + h).tanh(),)


def relu_cell(x: Tensor, h: Tensor, state: State) -> State:
    return ((x + h).relu(),)


CELLS: dict[str, Cell] = {"lstm": lstm_cell, "gru": gru_cell, "rnn_tanh": tanh_cell, "rnn_relu": relu_cell}


class StepByStep(TorchFunctionMode):
    """Inside `with StepByStep(round):` torch.lstm, gru, rnn_* and their *_cell functions call `round` on the state."""

    def __init__(self, round_state: Round, round_unprojected: Round | None = None):
        super().__init__()
        self.round = round_state
        self.round_unprojected = round_unprojected

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        if name in CELLS:
            if isinstance(args[2], list):
                return self._padded(name, *args)
            return self._packed(name, *args)
        if name.endswith("_cell") and name.removesuffix("_cell") in CELLS:
            return self._one_step(CELLS[name.removesuffix("_cell")], *args)
        return func(*args, **(kwargs or {}))

    def _one_step(self, cell: Cell, x: Tensor, hx: Any, *weights: Any) -> Any:
        w_ih, w_hh, b_ih, b_hh = weights
        state = (hx,) if isinstance(hx, Tensor) else tuple(hx)
        new = cell(F.linear(x, w_ih, b_ih), F.linear(self.round(state[0]), w_hh, b_hh), state)
        return new[0] if isinstance(hx, Tensor) else new

    def _padded(
        self, name: str, x: Tensor, hx: Any, weights: list[Tensor], *options: Any
    ) -> tuple[Tensor, ...]:
        *rest, batch_first = options
        x = x.transpose(0, 1) if batch_first else x
        steps, batch = x.shape[:2]
        flat, *last = self._layers(name, x.flatten(0, 1), [batch] * steps, hx, weights, Options(*rest))
        out = flat.unflatten(0, (steps, batch))
        return (out.transpose(0, 1) if batch_first else out, *last)

    def _packed(
        self, name: str, x: Tensor, sizes: Tensor, hx: Any, weights: list[Tensor], *options: Any
    ) -> tuple[Tensor, ...]:
        return self._layers(name, x, sizes.tolist(), hx, weights, Options(*options))

    def _layers(
        self, name: str, x: Tensor, sizes: list[int], hx: Any, weights: list[Tensor], options: Options
    ) -> tuple[Tensor, ...]:
        """`x` holds the steps one after the other, `sizes` how many sequences are in each (never more than before)."""
        directions = 2 if options.bidirectional else 1
        each = len(weights) // (options.layers * directions)
        starts = (hx,) if isinstance(hx, Tensor) else hx
        last: list[State] = []
        for layer in range(options.layers):
            if layer:
                x = self.round(F.dropout(x, options.dropout, options.training))
            outputs = []
            for direction in range(directions):
                i = len(last)
                start = tuple(part[i] for part in starts)
                mine = self._weights(weights[i * each : (i + 1) * each], options.bias)
                out, end = self._direction(CELLS[name], x, sizes, start, mine, backwards=bool(direction))
                outputs.append(out)
                last.append(end)
            x = torch.cat(outputs, -1) if options.bidirectional else outputs[0]
        return (x, *(torch.stack(part) for part in zip(*last)))

    def _weights(self, weights: list[Tensor], has_bias: bool) -> Weights:
        """torch's list for one layer and direction: w_ih, w_hh, then b_ih and b_hh, then w_hr, if there are any."""
        b_ih = b_hh = w_hr = None
        if has_bias:
            b_ih, b_hh = weights[2:4]
        if self.round_unprojected is not None:
            w_hr = weights[-1]
        return Weights(weights[0], weights[1], b_ih, b_hh, w_hr)

    def _direction(
        self, cell: Cell, x: Tensor, sizes: list[int], state: State, weights: Weights, backwards: bool
    ) -> tuple[Tensor, State]:
        w_ih, w_hh, b_ih, b_hh, w_hr = weights
        steps = list(enumerate(F.linear(x, w_ih, b_ih).split(sizes)))
        outputs: list[Tensor] = [x] * len(sizes)
        for t, part in reversed(steps) if backwards else steps:
            running = tuple(value[: sizes[t]] for value in state)  # shorter sequences wait, or have ended
            new = cell(part, F.linear(self.round(running[0]), w_hh, b_hh), running)
            if w_hr is not None and self.round_unprojected is not None:
                new = (F.linear(self.round_unprojected(new[0]), w_hr), *new[1:])
            outputs[t] = new[0]
            state = tuple(
                torch.cat([n, old[len(n) :]]) if len(n) < len(old) else n for n, old in zip(new, state)
            )
        return torch.cat(outputs), state
