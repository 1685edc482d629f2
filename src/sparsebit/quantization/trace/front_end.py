"""The door: whatever the user has (a module, an exported program) becomes the graph that the passes work on."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import fx, nn

from sparsebit.errors import ConfigError, TraceError
from sparsebit.graph.run.calls import Call, device_of
from sparsebit.graph.trace.from_module import trace, unwrapped
from sparsebit.graph.trace.guards import as_traced, make_unread_optional
from sparsebit.quantization.quant_config import QuantConfig
from sparsebit.quantization.quant_tracer import QTracer

FRONT_ENDS = ("fx", "export", "auto")


def to_graph(model: Any, config: QuantConfig, example: Any, front_end: str) -> fx.GraphModule:
    """A GraphModule over a copy of `model`, with `meta`: islands, signature, fixed inputs.

    "auto" starts with torch.fx, too (auto_trace.py).
    """
    if front_end not in FRONT_ENDS:
        raise ConfigError(f"trace: {front_end!r} is not one of {', '.join(FRONT_ENDS)}")
    model = unwrapped(model)
    if isinstance(model, torch.export.ExportedProgram) or _is_exported(model):
        from sparsebit.graph.export.from_export import from_exported

        return _finished(from_exported(model))
    if not isinstance(model, nn.Module) or hasattr(model, "named_quantizers"):
        what = "a QuantModel already"
        if not isinstance(model, nn.Module):
            what = f"{model!r}, which is not an nn.Module"
        raise TraceError(f"QuantModel(model, ...): expected an instance of nn.Module in float, got {what}")
    call = None
    if example is not None:
        call = Call.of(example, inspect.signature(model.forward)).to(device_of(model))
    if front_end != "export":
        return _by_fx(model, config, call)
    if call is None:
        raise TraceError(
            'trace="export" needs an example: QuantModel(model, config, example=batch, trace="export")'
        )
    return _by_export(model, call)


def _by_export(model: nn.Module, call: Call) -> fx.GraphModule:
    from sparsebit.graph.export.from_export import trace_export

    gm = _finished(trace_export(model, call[0], dict(call[1])))
    gm.meta["signature"] = inspect.signature(model.forward)
    return gm


def _by_fx(model: nn.Module, config: QuantConfig, call: Call | None) -> fx.GraphModule:
    """torch.fx. If that leaves islands, an `if` on sizes takes the branch of the example, and the graph checks the
    sizes."""
    gm = trace(model, QTracer(config.skip_trace_modules), call)
    if gm.meta["islands"] and call is not None:
        decided = trace(model, QTracer(config.skip_trace_modules, decides=True), call)
        if len(decided.meta["islands"]) < len(gm.meta["islands"]):
            gm = decided
    make_unread_optional(gm)
    return gm


def _is_exported(model: Any) -> bool:
    """A GraphModule of aten ops: what `exported_program.module()` gives."""
    return isinstance(model, fx.GraphModule) and any(
        isinstance(n.target, torch._ops.OpOverload) for n in model.graph.nodes
    )


def _finished(gm: fx.GraphModule) -> fx.GraphModule:
    gm.meta.setdefault("islands", {})
    gm.meta.setdefault("fixed", {})
    return gm


def refuse_other_inputs(gm: fx.GraphModule, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """An input that the trace left at its default is a constant in the graph: another value would be ignored."""
    try:
        given = gm.meta["signature"].bind(*args, **kwargs).arguments
    except TypeError:
        return  # the error of the forward itself is the clearest
    for name, value in gm.meta["fixed"].items():
        if name in given:
            as_traced(name, given[name], value)
