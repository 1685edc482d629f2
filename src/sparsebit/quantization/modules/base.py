"""QuantOpr: an operation with a quantizer on its input and, where it has one, on its weight.

The graph hands the arguments over as the user wrote them; a QuantOpr quantizes the first and calls the
original module or function. So an activation, pool or shape op is one line in a table (`define`), and every
option of the op it replaces is honoured.
"""

from __future__ import annotations

import operator
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, ClassVar, TypeVar

import torch
from torch import Tensor, fx, nn

from sparsebit.export.kernels.integer_kernels import why_float_grids
from sparsebit.graph.ops import called_module, inputs_of
from sparsebit.graph.rewrite import insert_module_before
from sparsebit.graph.trace.tracer import forward_owner
from sparsebit.numeric.spec import QuantSpec
from sparsebit.quantization.common import Backend, get_backend
from sparsebit.quantization.quantizers import Mode, Quantizer, build_quantizer
from sparsebit.quantization.quantizers.base import Reuse
from sparsebit.registry import Registry

QMODULE_MAP: Registry[type[nn.Module]] = Registry("operation")
NAMESPACES = (torch, torch.Tensor, nn.functional, torch.special, torch.linalg, torch.fft, operator)
M = TypeVar("M", bound=type[nn.Module])


def register_qmodule(sources: Any) -> Callable[[M], M]:
    """`@register_qmodule(sources=[nn.ReLU, F.relu, torch.Tensor.relu])`: this class replaces those ops."""

    def add(cls: M) -> M:
        QMODULE_MAP.add(sources, cls)
        return cls

    return add


class Computed:
    """An attribute that is computed when it is read, unless the object stores a value under that name."""

    def __init__(self, function: Callable[[Any], Any]):
        self.function = function

    def __get__(self, owner: Any, cls: type) -> Any:
        return self if owner is None else self.function(owner)


class Opr(nn.Module):
    """An operation in the graph, called with the arguments of the call it replaces."""

    op: Callable[..., Any]
    moves_values: ClassVar[bool] = False  # True: every value of the result is a value of an input

    @Computed
    def _repr_info(self) -> str:
        """The op as a text; the original's ops wrote it in their constructors."""
        return f"{type(self).__name__}({self.extra_repr()})"

    def __init__(self, org_module: Any = None, config: Any = None):
        nn.Module.__init__(self)
        if isinstance(org_module, nn.Module):
            self.adopt(org_module)
        elif isinstance(org_module, fx.Node):
            self.op = _callable_of(org_module)

    def adopt(self, module: nn.Module) -> None:
        """Take over `module`: keep it whole as `op`, or (classes that are such a module) take its contents."""
        if not isinstance(self, forward_owner(type(module))):
            self.op = module
            return
        for key, value in vars(module).items():
            self.__dict__[key] = value.copy() if isinstance(value, dict) else value
        # weight_norm and friends: take their result (removing them would change a class the user's model shares)
        for name in list(getattr(module, "parametrizations", ())):
            self._parameters[name] = nn.Parameter(getattr(module, name).detach().clone())
            self._modules.pop("parametrizations", None)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.op(*args, **kwargs)

    def extra_repr(self) -> str:
        if "_repr_info" in self.__dict__:
            return str(self._repr_info)
        op = self.__dict__.get("op")
        if op is not None:
            return getattr(op, "__name__", "")
        return super().extra_repr()


class Mover(Opr):
    """An operation that moves or picks values and computes none."""

    moves_values = True


class Value(Mover):
    """An operation whose result is a Python value: a size, a flag."""


class QuantOpr(Opr):
    """An operation that quantizes its first tensor, and its weight if it has one."""

    weight_axis: ClassVar[int] = 0  # the output-channel axis of the weight
    quantize_weight: ClassVar[bool] = True  # False: its weight is a per-channel scale, folded or cheap
    quantize_input: ClassVar[bool] = True
    input_axis: ClassVar[int] = 1  # the channel axis of the input
    input_name: ClassVar[str] = "input"  # the keyword of the tensor that is quantized
    # output_shift(weight_error, mean_input) -> what the error adds to each output channel on average;
    # an op that defines it, and uses `current_bias`, gets bias correction
    output_shift: Callable[[Tensor, Tensor], Tensor] | None = None
    weight: Any  # a Parameter, or None
    bias: Any
    groups: Any
    input_quantizer: Quantizer | None
    weight_quantizer: Quantizer | None
    bias_correction: Tensor | None  # added to the bias while the weight is quantized

    def __init__(self, org_module: Any = None, config: Any = None):
        super().__init__(org_module, config)
        if "weight" not in self._parameters:
            self.weight = None
        self.input_quantizer = self.weight_quantizer = None
        self.register_buffer("bias_correction", None)
        self.reuse: Reuse | None = None  # may this op write into its input?
        self.equalization: Any = None  # what to fold after calibration

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.op(*self.quantize_first(args, kwargs), **kwargs)

    def quantized_input(self, x: Any) -> Any:
        """`x` on the grid; the tensors of a list share one."""
        if self.input_quantizer is None:
            return x
        if type(x) in (list, tuple):
            return type(x)(self.quantized_input(v) for v in x)
        return self.input_quantizer(x)

    def quantized_weight(self) -> Tensor:
        if self.weight_quantizer is None:
            return self.weight
        return self.weight_quantizer(self.weight)

    def quantize_first(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...]:
        """`args` with its first entry quantized; a tensor passed by keyword is quantized in `kwargs`."""
        if args:
            return (self.quantized_input(args[0]), *args[1:])
        found = (k for k, v in kwargs.items() if k == "tensors" or isinstance(v, Tensor))
        key = next(found, None)
        if self.input_name in kwargs:
            key = self.input_name
        if key is not None:
            kwargs[key] = self.quantized_input(kwargs[key])
        return args

    def build_quantizer(self, config: Any) -> None:
        """Attach the quantizers that `config` (a QuantConfig for this layer) asks for."""
        backend = get_backend(config.backend)
        if self.weight is not None and self.quantize_weight:
            self.weight_quantizer = build_quantizer(config.w)
            self.weight_quantizer.set_ch_axis(self.weight_axis)
            self.weight_quantizer.dims = self.weight.dim()
            self.weight_quantizer.qdesc.set_group(self.weight_group(config.w.group))
            self.weight_quantizer.set_backend(backend)
            self.weight_quantizer.pair_rule = self._has_pair_rule(config, backend)
            self.weight_quantizer.on_regrid = self._after_regrid
            if config.schedule.bias_correction and self.output_shift is not None:
                channels = self.weight.shape[self.weight_axis] * (self.groups if self.weight_axis else 1)
                self.bias_correction = self.weight.new_zeros(channels)
        if self.quantize_input:
            self.input_quantizer = build_quantizer(config.a)
            self.input_quantizer.set_backend(backend)

    @property
    def sums_pairs(self) -> bool:
        """Does an integer kernel of this op add products two by two, in 16 bits, on x86 without VNNI?"""
        return False

    def _has_pair_rule(self, config: Any, backend: Backend) -> bool:
        reads_integers = not config.a.quantizer.disable
        return backend is Backend.ONNXRUNTIME and config.w.pair_rule and reads_integers and self.sums_pairs

    def _after_regrid(self) -> None:
        """The weight has another grid than the one it was calibrated to."""
        assert self.weight_quantizer is not None
        self.weight_quantizer.fit_pairs(self.weight)
        if self.bias_correction is not None:
            self.drop_correction()

    def weight_group(self, asked: int | None) -> int | None:
        """The number of values of the weight that share a scale; None: a whole channel. Linear layers have groups."""
        return None

    @property
    def current_bias(self) -> Tensor | None:
        """The bias, corrected for the error of the rounded weight, and rounded where the runtime rounds it."""
        quantizer = self.weight_quantizer
        bias = self.bias
        if quantizer is None or not quantizer.is_enable:
            return bias
        if self.bias_correction is not None:
            if bias is None:
                bias = self.bias_correction
            else:
                bias = bias + self.bias_correction
        return bias if bias is None else self._as_added(bias)

    def _as_added(self, bias: Tensor) -> Tensor:
        """Integer kernels add the bias as int32, on the grid of input times weight."""
        x = self.input_quantizer
        w = self.weight_quantizer
        if w is None or x is None or not x.is_enable or x.unused or not integer_kernel(x, w):
            return bias
        if bias.dtype != torch.float32:
            return bias
        step = x.current_qparams().scale * w.current_qparams().scale
        # the groups of a transposed convolution share their scales
        if len(step) > 1 and len(bias) != len(step):
            step = step.repeat(len(bias) // len(step))
        codes = (bias.detach().double() / step).round()
        # or int32 cannot hold it
        rounded = torch.where(codes.abs() < 2**31, codes.float() * step, bias.detach())
        # the gradient passes
        if bias.requires_grad:
            return rounded + (bias - bias.detach())
        return rounded

    def drop_correction(self) -> None:
        """The correction was for another grid of the weight."""
        assert self.bias_correction is not None
        self.bias_correction = torch.zeros_like(self.bias_correction)

    def quantizers(self) -> Iterator[Quantizer]:
        for quantizer in (self.input_quantizer, self.weight_quantizer):
            if quantizer is not None:
                yield quantizer

    def input_specs(self) -> list[QuantSpec]:
        """The grid of its input once it is calibrated: an equalized input observes channels, and has one scale then."""
        x = self.input_quantizer
        if x is None or x.absorbed or x.unused:
            return []
        return [x.spec if self.equalization is None else replace(x.spec, axis=None)]

    def set_fake_fused(self) -> None:
        """Never quantize here: this op is computed together with its neighbour."""
        for quantizer in self.quantizers():
            quantizer.set_fake_fused()

    @property
    def fake_fused(self) -> bool:
        return all(q.absorbed for q in self.quantizers())

    def set_quant(self, w_quant: bool = False, a_quant: bool = False) -> None:
        """Switch both quantizers; the one not named is switched off."""
        for quantizer, on in ((self.weight_quantizer, w_quant), (self.input_quantizer, a_quant)):
            if quantizer is not None:
                quantizer.enable_quant() if on else quantizer.disable_quant()


def integer_kernel(x: Quantizer, w: Quantizer) -> bool:
    """Does the runtime multiply such an input and such a weight in integers? Only onnxruntime is known to."""
    exact = (x.mode, w.mode) == (Mode.QUANT, Mode.QUANT) and w.backend is Backend.ONNXRUNTIME
    return exact and x.scale.numel() == 1 and not why_float_grids(w.spec, [replace(x.spec, axis=None)])


@register_qmodule(sources=[nn.Identity])
class QIdentity(QuantOpr):
    """The quantizer of one input of a multi-input op, or an nn.Identity the user marked with `.remove = False`."""

    moves_values = True

    def forward(self, x_in: Any) -> Any:
        return self.quantized_input(x_in)


class MultipleInputsQuantOpr(Opr):
    """An operation on several tensors: it owns no quantizer; the graph gets a QIdentity before each input."""

    operands: ClassVar[tuple[tuple[int, str], ...]] = ()  # (place, keyword) of the inputs; (): all of them

    def __init__(self, org_module: Any = None, config: Any = None):
        super().__init__(org_module, config)
        self.apply_input_quant = True  # False: the inputs stay float
        self.input_quantizer_generated = False

    def wants_input_quant(self, config: Any) -> bool:
        """True if `config` asks for quantized inputs of this op."""
        return bool(self.apply_input_quant)

    def prepare_input_quantizer(self, node: fx.Node, model: fx.GraphModule) -> int:
        """Put a QIdentity before each operand of `node`, one for a value used twice; returns how many."""
        inputs = [value for value in self.operands_of(node) if not is_number(value, model)]
        if len(inputs) < 2 and not self.operands:
            return 0  # x + 1: nothing to bring to a common grid
        args = node.args
        kwargs = node.kwargs
        values = list(dict.fromkeys(inputs))
        for i, arg in enumerate(values):
            call = insert_module_before(model, node, arg, f"{node.name}_identity{i}", QIdentity())
            call.meta["path"] = f"{node.meta.get('path', node.name)}_identity{i}"
        if self.operands:  # a value that is also the bias stays float there
            chosen: set[int | str] = set()
            for operand in self.operands:
                chosen.update(operand)
            node.args = tuple(
                new if i in chosen else old for i, (new, old) in enumerate(zip(node.args, args))
            )
            node.kwargs = {k: v if k in chosen else kwargs[k] for k, v in node.kwargs.items()}
        self.input_quantizer_generated = True
        return len(values)

    def operands_of(self, node: fx.Node) -> list[fx.Node]:
        """The inputs that are quantized; `operands` names the arguments of the call."""
        if not self.operands:
            return inputs_of(node)
        found = (node.args[i] if i < len(node.args) else node.kwargs.get(name) for i, name in self.operands)
        return [value for value in found if isinstance(value, fx.Node)]


def is_number(node: fx.Node, gm: fx.GraphModule, depth: int = 8) -> bool:
    """Is the value a size, or computed from sizes alone? False where that is not known."""
    module = called_module(node, gm)
    if isinstance(module, Value) or not isinstance(module, Opr):
        return isinstance(module, Value)
    is_operator = getattr(module.__dict__.get("op"), "__module__", "") == "_operator"
    inputs = node.all_input_nodes
    return is_operator and depth > 0 and all(is_number(value, gm, depth - 1) for value in inputs)


@contextmanager
def quant_mode(model: nn.Module, w: bool = False, a: bool = False) -> Iterator[None]:
    """Quantize weights and/or activations inside the block; every mode comes back afterwards, also on error."""
    saved = [(m, m.mode) for m in model.modules() if isinstance(m, Quantizer)]
    try:
        for module in model.modules():
            if isinstance(module, QuantOpr):
                module.set_quant(w_quant=w, a_quant=a)
        yield
    finally:
        for quantizer, mode in saved:
            quantizer.mode = mode


def define(name: str, kind: type[Opr], *sources: Any, doc: str = "") -> Any:
    """A table row: class `name` of `kind` that replaces every one of `sources`.

    A source is a module class, a function, or a string: the name of a Tensor method.
    """
    ops = []
    for s in sources:
        ops.append(getattr(torch.Tensor, s) if isinstance(s, str) else s)
    where = sys._getframe(1).f_globals["__name__"]  # where the row stands: pickle looks the class up there
    cls = type(name, (kind,), {"__doc__": doc or kind.__doc__, "__module__": where})
    return register_qmodule(dict.fromkeys(ops))(cls)


def spelled(names: str) -> list[Any]:
    """Every function that torch, Tensor, F, torch.special, torch.linalg, torch.fft and operator have under `names`."""
    found = (getattr(space, name, None) for name in names.split() for space in NAMESPACES)
    return [function for function in found if callable(function)]


class Method:
    """A method by its name: what a graph calls need not be a Tensor."""

    def __init__(self, name: str):
        self.__name__ = name

    def __call__(self, owner: Any, *args: Any, **kwargs: Any) -> Any:
        return getattr(owner, self.__name__)(*args, **kwargs)


def _callable_of(node: fx.Node) -> Callable[..., Any]:
    if isinstance(node.target, str):
        return Method(node.target)
    return node.target
