"""How a traced model becomes a quantized one: the passes, in order. Read this file first.

    trace -> simplify -> to_qmodules -> insert_input_quantizers -> build_quantizers -> fuse_bn
          -> disable_unnecessary_quant

Every pass is `fn(gm, ctx) -> number of places it changed`; `run_passes` skips, times, lints and checks them.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from fnmatch import fnmatchcase

from torch import fx, nn

from sparsebit.graph.ops import module_of, writes_input
from sparsebit.graph.passes import graph_pass
from sparsebit.graph.rewrite import fresh_name, replace_modules
from sparsebit.graph.simplify import SIMPLIFIERS
from sparsebit.quantization.converters.fuse_operations import FINAL_PASSES, FUSE_PASSES
from sparsebit.quantization.modules import MultipleInputsQuantOpr, QuantOpr, find_qmodule
from sparsebit.quantization.quant_config import QuantConfig, resolve, unmatched

log = logging.getLogger("sparsebit")


@dataclass
class BuildContext:
    """What the passes share: the config, and what they have to tell."""

    config: QuantConfig
    float_ops: dict[str, str] = field(default_factory=dict)  # node name -> the op that has no QModule


@graph_pass("to_qmodules", keeps_output=True)
def to_qmodules(gm: fx.GraphModule, ctx: BuildContext) -> int:
    """Replace every op that has a QModule; name and count the ones that stay float."""
    new: dict[fx.Node, tuple[str, nn.Module]] = {}
    first_call: dict[nn.Module, fx.Node] = {}
    repeats: list[tuple[fx.Node, fx.Node]] = []
    for node in gm.graph.nodes:
        if not node.op.startswith("call"):
            continue
        skipped = node.op == "call_module" and _is_skipped(str(node.target), ctx)
        # what still writes into its input must go on doing so: a quantizer in front would hand it a copy
        cls = None if skipped or writes_input(node, gm) else find_qmodule(node, gm)
        if cls is None:
            ctx.float_ops[node.name] = _describe(node, gm)
            continue
        source = module_of(node, gm) if node.op == "call_module" else node
        if isinstance(source, nn.Module) and any(True for _ in source.parameters()):
            first = first_call.setdefault(source, node)
            if first is not node:  # weights used again: one QModule for all calls; others get one per call
                repeats.append((node, first))
                continue
        qmodule = cls(source, ctx.config) if source is node or _takes_config(cls) else cls(source)
        qmodule.training = source.training if isinstance(source, nn.Module) else gm.training
        new[node] = (_free_name(node.name, gm), qmodule)
    replace_modules(gm, new)
    for node, first in repeats:
        node.target = first.target
    return len(new) + len(repeats)


@graph_pass("insert_input_quantizers", keeps_output=True)
def insert_input_quantizers(gm: fx.GraphModule, ctx: BuildContext) -> int:
    """Give each input of a multi-input op a QIdentity that carries its quantizer; `x + x` gets one for both."""
    inserted = 0
    for node in list(gm.graph.nodes):
        module = module_of(node, gm) if node.op == "call_module" else None
        if not isinstance(module, MultipleInputsQuantOpr) or not module.wants_input_quant(ctx.config):
            continue
        inserted += module.prepare_input_quantizer(node, gm)
    return inserted


@graph_pass("build_quantizers", keeps_output=True)
def build_quantizers(gm: fx.GraphModule, ctx: BuildContext) -> int:
    """Attach the quantizers that the config asks for, layer by layer (SPECIFIC by fx name or module path)."""
    all_names: list[str] = []
    built: set[nn.Module] = set()
    for node in gm.graph.nodes:
        module = module_of(node, gm) if node.op == "call_module" else None
        if not isinstance(module, QuantOpr) or module in built:
            continue
        names = (node.name, str(node.meta.get("path", node.name)))
        all_names += names
        w, a = resolve(ctx.config.w, names), resolve(ctx.config.a, names)
        module.build_quantizer(ctx.config.model_copy(update={"w": w, "a": a}))
        for kind, quantizer in (("input", module.input_quantizer), ("weight", module.weight_quantizer)):
            if quantizer is not None:
                quantizer.name = f"{node.name}.{kind}_quantizer"
        built.add(module)
    for letter, section in (("W", ctx.config.w), ("A", ctx.config.a)):
        for pattern in unmatched(section, all_names):
            log.warning(
                "%s.SPECIFIC: %r matches no layer; names look like %s", letter, pattern, all_names[:4]
            )
    return len(built)


__all__ = ["FINAL_PASSES", "PIPELINE", "BuildContext"]
PIPELINE = [*SIMPLIFIERS, to_qmodules, insert_input_quantizers, build_quantizers, *FUSE_PASSES]


def _is_skipped(path: str, ctx: BuildContext) -> bool:
    return any(fnmatchcase(path, pattern) for pattern in ctx.config.skip_trace_modules)


def _free_name(name: str, gm: fx.GraphModule) -> str:
    """A QModule is stored under its node's name, unless a parameter or something of torch's has that name."""
    taken = getattr(gm, name, None)
    return name if taken is None or isinstance(taken, nn.Module) else fresh_name(gm, f"{name}_op")


def _describe(node: fx.Node, gm: fx.GraphModule) -> str:
    if node.op == "call_module":
        return f"{node.target} ({type(module_of(node, gm)).__name__})"
    return node.target if isinstance(node.target, str) else getattr(node.target, "__name__", str(node.target))


def _takes_config(cls: type) -> bool:
    """QModules take (org_module, config); ones written for early versions of the original only org_module."""
    code = getattr(vars(cls).get("__init__"), "__code__", None)
    return code is None or code.co_argcount > 2
