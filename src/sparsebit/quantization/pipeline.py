"""How a traced model becomes a quantized one: the passes, in order. Read this file first.

    trace -> simplify -> whole_activations -> whole_norms -> fold_affine -> merge_branches -> open_gates
          -> to_qmodules -> pads_into_convs -> insert_input_quantizers -> build_quantizers -> equalize_sums -> fuse_bn
          -> disable_unnecessary_quant -> softmax_in_float -> integer_outputs -> equalize -> one_grid
          -> wholly_float -> known_ranges

Every pass is `fn(gm, ctx) -> number of places it changed`; `run_passes` skips, times, lints and checks them.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any

from torch import fx, nn

from sparsebit.errors import ConfigError
from sparsebit.graph.ops import called_module, is_bookkeeping, module_calls, module_of, writes_input
from sparsebit.graph.passes import graph_pass
from sparsebit.graph.rewrite import fresh_name, insert_module_before, replace_modules
from sparsebit.graph.simplify import SIMPLIFIERS
from sparsebit.quantization.converters.constants import only_on_constants
from sparsebit.quantization.converters.ends import ends
from sparsebit.quantization.converters.fold_affine import fold_affine
from sparsebit.quantization.converters.fuse_operations import FINAL_PASSES, FUSE_PASSES
from sparsebit.quantization.converters.islands import quantize_inside
from sparsebit.quantization.converters.merge_branches import merge_branches
from sparsebit.quantization.converters.open_gates import open_gates
from sparsebit.quantization.converters.pads_into_convs import pads_into_convs
from sparsebit.quantization.converters.whole_activations import whole_activations
from sparsebit.quantization.converters.whole_norms import whole_norms
from sparsebit.quantization.modules import MultipleInputsQuantOpr, Opr, QuantOpr, find_qmodule
from sparsebit.quantization.modules.own_forward import own_forward
from sparsebit.quantization.modules.unary import QIdentity
from sparsebit.quantization.quant_config import QuantConfig, resolve, unmatched

log = logging.getLogger("sparsebit")


@dataclass
class BuildContext:
    """The common state of the passes: the config, an example batch if there is one, and their messages."""

    config: QuantConfig
    example: Any = None
    float_ops: dict[str, str] = field(default_factory=dict)  # node name -> the op that has no QModule


@graph_pass("to_qmodules", keeps_output=True)
def to_qmodules(gm: fx.GraphModule, ctx: BuildContext) -> int:
    """Replace every op that has a QModule, and the layers inside islands; name the ops that stay float.

    An op that reads only constants is computed once, so it is not replaced.
    """
    new: dict[fx.Node, tuple[str, nn.Module]] = {}
    first_call: dict[nn.Module, fx.Node] = {}
    repeats: list[tuple[fx.Node, fx.Node]] = []
    constants = only_on_constants(gm)
    for node in gm.graph.nodes:
        if not node.op.startswith("call") or is_bookkeeping(node) or node in constants:
            continue
        cls = _replacement(node, gm, ctx)
        if cls is None:
            if _is_skipped(node, ctx):
                inside = 0
            else:
                inside = _quantize_island(node, gm, ctx)
            if not inside:
                ctx.float_ops[node.name] = _describe(node, gm)
            continue
        if node.op == "call_module":
            source = module_of(node, gm)
        else:
            source = node
        if isinstance(source, nn.Module) and any(True for _ in source.parameters()):
            first = first_call.setdefault(source, node)
            if first is not node:  # weights used again: one QModule for all calls; others get one per call
                repeats.append((node, first))
                continue
        if source is node or _takes_config(cls):
            qmodule = cls(source, ctx.config)
        else:
            qmodule = cls(source)
        if isinstance(source, nn.Module):
            qmodule.training = source.training
        else:
            qmodule.training = gm.training
        new[node] = (_free_name(node.name, gm), qmodule)
    replace_modules(gm, new)
    for node, first in repeats:
        node.target = first.target
    return len(new) + len(repeats)


@graph_pass("insert_input_quantizers", keeps_output=True)
def insert_input_quantizers(gm: fx.GraphModule, ctx: BuildContext) -> int:
    """Give each input of a multi-input op a QIdentity that carries its quantizer; `x + x` gets one for both."""
    inserted = 0
    calls = module_calls(gm)
    for node in list(gm.graph.nodes):
        module = called_module(node, gm)
        if isinstance(module, MultipleInputsQuantOpr) and module.wants_input_quant(ctx.config):
            inserted += module.prepare_input_quantizer(node, gm)
        elif isinstance(module, QuantOpr) and ctx.config.a.per_call and calls[str(node.target)] > 1:
            inserted += _quantize_per_call(node, module, gm)
    return inserted


@graph_pass("build_quantizers", keeps_output=True)
def build_quantizers(gm: fx.GraphModule, ctx: BuildContext) -> int:
    """Attach the quantizers that the config asks for, layer by layer (SPECIFIC by fx name, module path or place)."""
    all_names: list[str] = []
    places = ends(gm)
    built: set[nn.Module] = set()
    for node in gm.graph.nodes:
        for inside, module in _quant_oprs(node, gm):
            if module in built:
                continue
            names = _names(node, inside)
            known = [*names, *_enclosing(node, inside), *places.get(module, ())]
            all_names += known
            w = resolve(ctx.config.w, known)
            a = resolve(ctx.config.a, known)
            try:
                module.build_quantizer(ctx.config.model_copy(update={"w": w, "a": a}))
            except ConfigError as error:
                raise ConfigError(f"{names[-1]}: {error}") from None
            for kind, quantizer in (("input", module.input_quantizer), ("weight", module.weight_quantizer)):
                if quantizer is not None:
                    quantizer.name = f"{names[0]}.{kind}_quantizer"
            built.add(module)
    for letter, section in (("W", ctx.config.w), ("A", ctx.config.a)):
        for pattern in unmatched(section, all_names):
            log.warning(
                "%s.SPECIFIC: %r matches no layer; names look like %s", letter, pattern, all_names[:4]
            )
    return len(built)


__all__ = [
    "CONVERT_PASSES",
    "FINAL_PASSES",
    "FUSE_PASSES",
    "PIPELINE",
    "QUANTIZER_PASSES",
    "SIMPLIFIERS",
    "BuildContext",
]
CONVERT_PASSES = [
    whole_activations,
    whole_norms,
    fold_affine,
    merge_branches,
    open_gates,
    to_qmodules,
    pads_into_convs,
]
QUANTIZER_PASSES = [insert_input_quantizers, build_quantizers]
PIPELINE = [*SIMPLIFIERS, *CONVERT_PASSES, *QUANTIZER_PASSES, *FUSE_PASSES]


def _replacement(node: fx.Node, gm: fx.GraphModule, ctx: BuildContext) -> type[nn.Module] | None:
    """The QModule class for a node; None: the node is not replaced."""
    # what still writes into its input must go on doing so: a quantizer in front would hand it a copy
    if _is_skipped(node, ctx) or writes_input(node, gm):
        return None
    cls = find_qmodule(node, gm)
    if cls is None and node.op == "call_module" and not isinstance(module_of(node, gm), Opr):
        cls = own_forward(type(module_of(node, gm)))  # an island that is a layer itself
    return cls


def _is_skipped(node: fx.Node, ctx: BuildContext) -> bool:
    patterns: Sequence[str] = ()
    if node.op == "call_module":
        patterns = ctx.config.skip_trace_modules
    names = (str(node.target), str(node.meta.get("path", "")))
    return any(fnmatchcase(name, pattern) for name in names for pattern in patterns)


def _quantize_island(node: fx.Node, gm: fx.GraphModule, ctx: BuildContext) -> int:
    if node.op == "call_module":
        return quantize_inside(module_of(node, gm), ctx.config)
    return 0


def _quantize_per_call(node: fx.Node, module: QuantOpr, gm: fx.GraphModule) -> int:
    """Move the input quantizer out of a layer that is called several times: one QIdentity before each call."""
    if not type(module).quantize_input or not node.args or not isinstance(node.args[0], fx.Node):
        return 0
    call = insert_module_before(gm, node, node.args[0], f"{node.name}_identity", QIdentity())
    call.meta["path"] = f"{node.meta.get('path', node.name)}_identity"
    module.__dict__["quantize_input"] = False
    return 1


def _quant_oprs(node: fx.Node, gm: fx.GraphModule) -> Iterator[tuple[str, QuantOpr]]:
    """The ops with quantizers that a node runs, and where they are inside its module: "" is the module itself."""
    if node.op == "call_module":
        for inside, module in module_of(node, gm).named_modules():
            if isinstance(module, QuantOpr):
                yield inside.removeprefix("root."), module  # graph.islands.Whole holds the model as `root`


def _names(node: fx.Node, inside: str) -> tuple[str, str]:
    """The fx name and the module path of an op, as SPECIFIC matches them."""
    path = str(node.meta.get("path", node.name))
    if not inside:
        return node.name, path
    # in a model that stayed whole, names start at its layers
    prefix = ""
    if path:
        prefix = f"{node.name}_"
    return prefix + inside.replace(".", "_"), f"{path}.{inside}".lstrip(".")


def _enclosing(node: fx.Node, inside: str) -> Iterator[str]:
    """The names of the layers around an op inside a layer: a pattern for an LSTM means its weights too."""
    parts = inside.split(".") if inside else []
    for i in range(len(parts)):
        yield from _names(node, ".".join(parts[:i]))


def _free_name(name: str, gm: fx.GraphModule) -> str:
    """A QModule is stored under its node's name, unless a parameter or something of torch's has that name."""
    taken = getattr(gm, name, None)
    if taken is None or isinstance(taken, nn.Module):
        return name
    return fresh_name(gm, f"{name}_op")


def _describe(node: fx.Node, gm: fx.GraphModule) -> str:
    if node.op == "call_module":
        return f"{node.target} ({type(module_of(node, gm)).__name__})"
    if isinstance(node.target, str):
        return node.target
    return getattr(node.target, "__name__", str(node.target))


def _takes_config(cls: type) -> bool:
    """QModules take (org_module, config); ones written for early versions of the original only org_module."""
    code = getattr(vars(cls).get("__init__"), "__code__", None)
    return code is None or code.co_argcount > 2
