"""RNN, LSTM, GRU and their cells: the input and every weight matrix are quantized, per output channel (axis 0).

torch's own kernel computes with the rounded weights. The hidden state stays float: it circulates inside that kernel,
and inside ONNX's LSTM, which has no place for a quantizer and no integer form. A.RNN_STATE: true rounds it at every
step, in a loop (recurrent_steps.py); for hardware that computes such layers in integers.
"""

from __future__ import annotations

from typing import Any, ClassVar

from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from sparsebit.quantization.modules.base import QuantOpr, register_qmodule
from sparsebit.quantization.modules.composite.recurrent_steps import StepByStep
from sparsebit.quantization.modules.unary import QIdentity


class QWeight(QuantOpr):
    """One weight matrix with its quantizer; calling it gives the weight to compute with."""

    quantize_input = False

    def __init__(self, weight: Tensor):
        super().__init__()
        owned = isinstance(weight, nn.Parameter)
        if owned:
            self.weight = weight
        else:
            self.weight = nn.Parameter(weight.detach().clone(), weight.requires_grad)

    def forward(self) -> Tensor:
        return self.quantized_weight()


class QState(QIdentity):
    """The quantizer of the hidden state, where A.RNN_STATE asks for one."""

    input_axis = -1
    moves_values = False  # the layer around it computes the state
    why_float = "A.RNN_STATE is off"

    def build_quantizer(self, config: Any) -> None:
        if config.a.rnn_state:
            super().build_quantizer(config)


class Recurrent(QuantOpr):
    """Each weight matrix `weight_ih_l0` becomes a child of that name, a QWeight; biases are not changed."""

    kind: ClassVar[type[nn.Module]]  # the class of torch that computes
    quantize_weight = False  # here; its children do
    input_axis = -1

    def __init__(self, org_module: Any = None, config: Any = None):
        super().__init__(org_module, config)
        names = getattr(self, "_flat_weights_names", ("weight_ih", "weight_hh"))
        for name in names if org_module is not None else ():
            if name.startswith("weight"):
                self._end_hook(name)
                weight = QWeight(getattr(self, name)).train(self.training)
                self._parameters.pop(name, None)
                self.__dict__.pop(name, None)
                self._modules[name] = weight
        self.state = QState().train(self.training)
        # a projection shrinks the state: it reads another value than it returns
        self.unprojected: QState | None
        if getattr(self, "proj_size", 0):
            self.unprojected = QState().train(self.training)
        else:
            self.unprojected = None
        self._init_flat_weights()

    def _end_hook(self, name: str) -> None:
        """torch.nn.utils.weight_norm computes the weight before each call: take the present result."""
        for key, hook in list(self._forward_pre_hooks.items()):
            if getattr(hook, "name", None) == name:
                hook(self, ())
                del self._forward_pre_hooks[key]
                for source in ("_g", "_v"):
                    self._parameters.pop(name + source, None)

    def forward(self, input: Tensor | PackedSequence, hx: Any = None) -> Any:
        # torch's forward runs on a throw-away object with the same attributes, but the rounded weights
        weights = {name: m() for name, m in self._modules.items() if isinstance(m, QWeight)}
        view = object.__new__(self.kind)
        view.__dict__.update(vars(self), **weights)
        names = getattr(self, "_flat_weights_names", ())
        view.__dict__["_flat_weights"] = [weights[n] if n in weights else getattr(self, n) for n in names]
        if self.state.input_quantizer is None:
            return self.kind.forward(view, self.quantized_input(input), hx)
        with StepByStep(self.state, self.unprojected):
            return self.kind.forward(view, self.quantized_input(input), hx)

    def quantized_input(self, x: Any) -> Any:
        if isinstance(x, PackedSequence):
            return x._replace(data=super().quantized_input(x.data))
        return super().quantized_input(x)

    def _init_flat_weights(self) -> None:
        """torch keeps its parameters in a second list, by weak references; here forward makes that list."""
        empty = [None] * len(getattr(self, "_flat_weights_names", ()))
        self.__dict__.update(_flat_weights=empty, _flat_weight_refs=list(empty))


@register_qmodule(sources=[nn.LSTM])
class QLSTM(Recurrent, nn.LSTM):
    kind = nn.LSTM


@register_qmodule(sources=[nn.GRU])
class QGRU(Recurrent, nn.GRU):
    kind = nn.GRU


@register_qmodule(sources=[nn.RNN])
class QRNN(Recurrent, nn.RNN):
    kind = nn.RNN


@register_qmodule(sources=[nn.LSTMCell])
class QLSTMCell(Recurrent, nn.LSTMCell):
    kind = nn.LSTMCell


@register_qmodule(sources=[nn.GRUCell])
class QGRUCell(Recurrent, nn.GRUCell):
    kind = nn.GRUCell


@register_qmodule(sources=[nn.RNNCell])
class QRNNCell(Recurrent, nn.RNNCell):
    kind = nn.RNNCell
