"""The rows of a pre-flight report: for every op, quantized with what, float and why, or absorbed into what."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from torch import fx, nn

from sparsebit.export.backends import BACKENDS
from sparsebit.export.kernels.integer_kernels import OUTPUT, WRONG
from sparsebit.graph.ops import called_module, is_bookkeeping, writes_input
from sparsebit.numeric.spec import QuantSpec
from sparsebit.quantization.analysis.costs import Measured
from sparsebit.quantization.common import QuantTarget
from sparsebit.quantization.converters.constants import STORED, WHY_FLOAT, on_constants, only_on_constants
from sparsebit.quantization.converters.output_grids import OutputGrids
from sparsebit.quantization.layers import (
    active_quantizers,
    carries_for,
    input_carriers,
    is_active,
    moves_values,
    names_of,
)
from sparsebit.quantization.modules import MultipleInputsQuantOpr, Opr, QuantOpr
from sparsebit.quantization.modules.activations import QSoftmax
from sparsebit.quantization.modules.conv import is_pointwise
from sparsebit.quantization.modules.matmul import Attention
from sparsebit.quantization.modules.unary import QIdentity
from sparsebit.quantization.quantizers import Quantizer

PARTS = "parts"  # a module made of QModules
HALF_FLOAT = "queries and keys in integers; probabilities in float (SCHEDULE.FLOAT_FORMS)"
WHOLLY_FLOAT = "between float values, or in narrow groups, integers bring nothing (SCHEDULE.WHOLLY_FLOAT)"
Grids = tuple[QuantSpec | None, list[QuantSpec]]  # of the weight, of the inputs


@dataclass(frozen=True)
class Row:
    """One op of the graph, or one QModule inside an island."""

    name: str
    path: str  # where it stands in the model
    op: str
    state: str  # quantized, float, absorbed, island, parts
    how: str  # quantized with what; float why; absorbed into what
    quantizers: tuple[str, ...] = ()  # by name; SPECIFIC matches the part before the last dot
    macs: int = 0
    quantized_macs: int = 0
    bytes: int = 0  # of its own parameters, in float
    quantized_bytes: int = 0  # of the same parameters, weights packed, with their scales
    integer: bool = False  # the backend computes it in integers
    backend: str = ""  # why, or why not


class RowBuilder:
    def __init__(self, gm: fx.GraphModule, config: Any, backend: str, measured: Measured | None):
        self.gm = gm
        self.config = config
        self.backend = backend
        self.islands: Mapping[str, Any] = gm.meta.get("islands", {})
        self.measured = measured or Measured()
        self.outputs = OutputGrids(gm)
        # a call of a layer that elsewhere reads values is computed once, in float, if all it reads is in the file
        self.constants = only_on_constants(gm) | on_constants(gm, STORED)
        self.seen: set[nn.Parameter] = set()  # a weight that is used twice counts once

    def rows(self) -> Iterator[Row]:
        for node in self.gm.graph.nodes:
            if not node.op.startswith("call") or is_bookkeeping(node):
                continue
            module = called_module(node, self.gm)
            if isinstance(module, QIdentity) and carries_for(node) is not None:
                continue  # shown with the op it belongs to
            inner = [] if module is None else self._inner(node, module)
            own_rows = {m for _, m in inner}
            yield self._row(node, module, own_rows)
            for inside, child in inner:
                yield self._inner_row(node, inside, child, own_rows)

    def _inner(self, node: fx.Node, module: nn.Module) -> list[tuple[str, nn.Module]]:
        """QModules below `module`, and the parts of it that multiplied in the example."""
        busy = {m for name, m in self.measured.macs if name == node.name}
        found: list[tuple[str, nn.Module]] = []
        for inside, child in module.named_modules():
            if child is not module and (isinstance(child, QuantOpr) or child in busy):
                found.append((inside.removeprefix("root."), child))
        return found

    # -- one op of the graph -------------------------------------------------------------------------
    def _row(self, node: fx.Node, module: nn.Module | None, inner: set[nn.Module]) -> Row:
        carried = []
        for _, m in input_carriers(node, self.gm):
            for q in active_quantizers(m):
                carried.append(q)
        quantizers = [*(active_quantizers(module) if module is not None else []), *carried]
        quantizers = [q for q in quantizers if q not in self.measured.not_float]
        state, how = self._state(node, module, quantizers)
        op = _op_name(node, module)
        inside, all_inside = _carried_inside(module)
        complete = all_inside and (bool(carried or inside) or _complete(module))
        grids = _grids(module, [*quantizers, *inside])
        gives_float = is_pointwise(module) and len(node.args) + len(node.kwargs) == 1  # without a pad
        integer, why = self._verdict(op, state, grids, complete, gives_float or node in self.outputs)
        integer, why = (False, how) if node in self.constants else (integer, why)
        if not integer and _probabilities_in_float(module):
            why = HALF_FLOAT
        if why == OUTPUT and self.outputs.differ(node):
            why = "its readers quantize it in different ways"
        keys = [k for k in self.measured.macs if k[0] == node.name and k[1] not in inner]
        return Row(
            *names_of(node),
            op,
            state,
            how,
            tuple(q.name for q in quantizers),
            sum(self.measured.macs[k] for k in keys),
            sum(self.measured.quantized[k] for k in keys),
            *self._bytes(module, inner),
            integer,
            why,
        )

    def _inner_row(self, node: fx.Node, inside: str, module: nn.Module, own_rows: set[nn.Module]) -> Row:
        quantizers = [q for q in active_quantizers(module) if q not in self.measured.not_float]
        op = _op_name(node, module)
        key = (node.name, module)
        macs = self.measured.macs.get(key, 0)
        quantized = self.measured.quantized.get(key, 0)
        if key in self.measured.constant and not macs:
            full, _ = self._bytes(module, own_rows)
            return Row(*names_of(node, inside), op, "float", WHY_FLOAT, bytes=full, quantized_bytes=full)
        state = "quantized"
        how = " / ".join(map(describe, quantizers))
        if not quantizers:
            state, how = self._without_quantizer(module)
        values, all_values = _carried_inside(module)
        complete = all_values and (bool(values) or _complete(module))
        integer, why = self._verdict(
            op, state, _grids(module, [*quantizers, *values]), complete, output=False
        )
        return Row(
            *names_of(node, inside),
            op,
            state,
            how,
            tuple(q.name for q in quantizers),
            macs,
            quantized,
            *self._bytes(module, own_rows),
            integer,
            why,
        )

    def _verdict(self, op: str, state: str, grids: Grids, complete: bool, output: bool) -> tuple[bool, str]:
        if state == "absorbed":
            return False, "with the op before it" if self.backend != "virtual" else ""
        weight, inputs = grids
        if not (weight or inputs) or op in ("Identity", "Weight"):  # these only carry a quantizer
            return False, ""
        why = BACKENDS[self.backend]().why_float(op, weight, inputs, complete, output)
        return not why, why or "integers"

    # -- why -----------------------------------------------------------------------------------------
    def _state(self, node: fx.Node, module: nn.Module | None, active: list[Quantizer]) -> tuple[str, str]:
        if node in self.constants:
            return "float", "this call reads only constants" if active else WHY_FLOAT
        if active:
            off = self._why_off(module)
            equalized = isinstance(module, QuantOpr) and module.equalization is not None
            what = [describe(q, equalized) for q in active]
            return "quantized", " / ".join(dict.fromkeys(what)) + (f"; {off}" if off else "")
        path = str(node.meta.get("path", ""))
        if path in self.islands:
            return "island", "runs as it is, layers inside are quantized"
        if writes_input(node, self.gm) and not isinstance(module, Opr):
            return "float", "writes into its input"
        absorbed = isinstance(module, QuantOpr) and any(
            q.absorbed and not _disabled(q) for q in module.quantizers()
        )
        if absorbed and isinstance(module, QSoftmax):
            return "float", WRONG
        if absorbed and isinstance(module, QuantOpr) and module.weight is not None and module.quantize_weight:
            return "float", WHOLLY_FLOAT
        if absorbed:
            if node.all_input_nodes:
                source = names_of(node.all_input_nodes[0])
            else:
                source = ("", "its neighbour")
            return "absorbed", f"into {source[1] or source[0]}"
        return self._without_quantizer(module)

    def _without_quantizer(self, module: nn.Module | None) -> tuple[str, str]:
        parts: Iterable[nn.Module] = ()
        if module is not None and not isinstance(module, QuantOpr):
            parts = module.modules()
        if any(active_quantizers(part) for part in parts):
            return PARTS, "its layers are quantized one by one"
        return "float", self._why_float(module)

    def _why_float(self, module: nn.Module | None) -> str:
        if isinstance(module, QuantOpr):
            quantizers = list(module.quantizers())
            if any(map(_disabled, quantizers)):
                return "quantizer disabled by the config"
            if any(q.unused or q in self.measured.not_float for q in quantizers):
                return "its input is not floating-point"
            if quantizers:
                return "absorbed"
            return getattr(module, "why_float", "this op is not quantized")
        if isinstance(module, MultipleInputsQuantOpr):
            if getattr(module, "why_float", ""):
                return str(module.why_float)
            if not module.wants_input_quant(self.config):
                return "A.QADD.ENABLE_QUANT is off"
            if module.input_quantizer_generated:
                return "its input is not floating-point"
            return "one input only"
        if isinstance(module, Opr):
            if moves_values(module):
                return "moves values only"
            return "this op is not quantized"
        return "no QModule" if module is None else "kept as it is"

    def _why_off(self, module: nn.Module | None) -> str:
        """Which half of a weighted op stays float."""
        if not isinstance(module, QuantOpr):
            return ""
        halves = (("weight", module.weight_quantizer), ("input", module.input_quantizer))
        off = (what for what, q in halves if q is not None and _disabled(q))
        return ", ".join(f"{what} float: disabled by the config" for what in off)

    # -- bytes ---------------------------------------------------------------------------------------
    def _bytes(self, module: nn.Module | None, inner: set[nn.Module]) -> tuple[int, int]:
        """Own parameters in float and quantized; those of `inner` modules have rows of their own."""
        if module is None:
            return 0, 0
        full = packed = 0
        for owner in module.modules():
            if isinstance(owner, Quantizer) or (owner in inner and owner is not module):
                continue
            for name, p in owner.named_parameters(recurse=False):
                if p not in self.seen:
                    self.seen.add(p)
                    full += p.nbytes
                    packed += packed_bytes(owner, name, p)
        return full, packed


def packed_bytes(owner: nn.Module, name: str, p: nn.Parameter) -> int:
    """Bytes of a stored parameter: a quantized weight in its bits, with a scale per channel."""
    quantizer = None
    if isinstance(owner, QuantOpr) and name == "weight":
        quantizer = owner.weight_quantizer
    if quantizer is None or not is_active(quantizer):
        return p.nbytes
    group = quantizer.spec.group
    channels = 1
    if quantizer.is_perchannel:
        channels = p.shape[quantizer.ch_axis]
    channels = channels if group is None else p.numel() // group
    return (p.numel() * quantizer.bit + 7) // 8 + channels * (4 if quantizer.is_symmetric else 5)


def _grids(module: nn.Module | None, quantizers: list[Quantizer]) -> Grids:
    """The grids that the active quantizers of an op have after calibration."""
    weights = [q for q in quantizers if q.qdesc.target is QuantTarget.WEIGHT]
    own = None
    if isinstance(module, QuantOpr):
        own = module.input_quantizer
    inputs: list[QuantSpec] = []
    for quantizer in quantizers:
        if quantizer is own and isinstance(module, QuantOpr):
            inputs += module.input_specs()
        elif quantizer not in weights:
            inputs.append(quantizer.spec)
    return weights[0].spec if weights else None, inputs


def _carried_inside(module: nn.Module | None) -> tuple[list[Quantizer], bool]:
    """Attention: the quantizers of the factors of its products, and whether all of them are active."""
    if module is None:
        carriers = []
    else:
        carriers = [m for m in module.children() if isinstance(m, QIdentity)]
    active = []
    for m in carriers:
        for q in active_quantizers(m):
            active.append(q)
    return active, len(active) == len(carriers)


def _probabilities_in_float(module: nn.Module | None) -> bool:
    """Attention of which calibration has switched off the second product only (calibration/float_choice.py)."""
    probs = None
    if isinstance(module, Attention):
        probs = module.probs.input_quantizer
    return probs is not None and probs.unused and not probs.absorbed


def _complete(module: nn.Module | None) -> bool:
    """Are the weight and the input both quantized, or the input of an op without weight?"""
    if not isinstance(module, QuantOpr):
        return False
    needed = []
    if module.weight is not None and module.quantize_weight:
        needed = [module.weight_quantizer]
    return all(map(is_active, [*needed, module.input_quantizer]))


def _disabled(quantizer: Quantizer) -> bool:
    return bool(quantizer.cfg.quantizer.disable)


def describe(quantizer: Quantizer, equalized: bool = False) -> str:
    """`W4 per-channel symmetric`. An equalized input observes per channel, and has one scale after calibration."""
    letter = "W" if quantizer.qdesc.target is QuantTarget.WEIGHT else "A"
    spec: QuantSpec = quantizer.spec
    kind = "per-channel"
    if spec.axis is None or (equalized and letter == "A"):
        kind = "per-tensor"
    kind = kind if spec.group is None else f"per-group({spec.group})"
    text = f"{letter}{spec.bits} {kind} {'symmetric' if spec.symmetric else 'affine'}"
    if quantizer.TYPE == "uniform":
        return text
    return f"{text} {quantizer.TYPE}"


def _op_name(node: fx.Node, module: nn.Module | None) -> str:
    if module is not None:
        name = type(module).__name__
        if isinstance(module, Opr) and name[:1] == "Q" and name[1:2].isupper():
            return name[1:]
        return name
    if isinstance(node.target, str):
        return node.target
    return getattr(node.target, "__name__", str(node.target))
