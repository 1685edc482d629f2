"""More facts for the report of a quantized model, beside its layers: histograms of the rounded values, and the
graph."""

from __future__ import annotations

import io
from contextlib import ExitStack
from typing import Any

BINS = 64


def histograms_of(qmodel: Any, batch: Any) -> dict[str, dict[str, Any]]:
    """A histogram per quantizer: 64 counts between the extremes, the range of its grid, and the share of values beyond
    it.

    Weights are counted whole, activations on one batch, both with the values of the float model.
    """
    from sparsebit.quantization.layers import as_calls, undisturbed

    found: dict[str, dict[str, Any]] = {}
    gm = qmodel.model
    with ExitStack() as stack:
        for name, quantizer in qmodel.named_quantizers():
            handle = quantizer.register_forward_pre_hook(_looker(found, name))
            stack.callback(handle.remove)
        stack.enter_context(undisturbed(gm))
        for args, kwargs in as_calls(gm, [batch]):
            gm(*args, **kwargs)
    return found


def _looker(found: dict[str, dict[str, Any]], name: str) -> Any:
    """Record the values of a quantizer. If it is called several times, as in a loop, the first call is shown."""
    import torch

    def look(quantizer: Any, args: tuple[Any, ...]) -> None:
        x = args[0] if args else None
        if name not in found and isinstance(x, torch.Tensor) and x.is_floating_point() and x.numel():
            found[name] = _histogram(quantizer, x.detach().float())

    return look


def _histogram(quantizer: Any, x: Any) -> dict[str, Any]:
    import torch

    from sparsebit.numeric.qparams import minmax_from_qparams

    qparams = quantizer.current_qparams()
    low, high = minmax_from_qparams(qparams, quantizer.spec)
    first = float(x.min())
    last = float(x.max())
    width = max(last - first, 1e-12)
    place = ((x.reshape(-1) - first) * (BINS / width)).long().clamp_(0, BINS - 1)
    return {
        "tensor": quantizer.cfg.letter,
        "from": first,
        "to": last,
        "counts": torch.bincount(place, minlength=BINS).tolist(),
        "range": [float(low.min()), float(high.max())],
        "clipped": _clipped(x, low, high, qparams.scale, quantizer),
    }


def _clipped(x: Any, low: Any, high: Any, scale: Any, quantizer: Any) -> float | None:
    """The share of values that are moved by more than rounding; None if groups have separate ranges."""
    if quantizer.spec.group is not None:
        return None
    if low.numel() > 1:
        axis = quantizer.ch_axis
        if low.numel() != x.shape[axis]:
            return None
        shape = []
        for i in range(x.dim()):
            shape.append(-1 if i == axis % x.dim() else 1)
        low, high, scale = (t.reshape(shape) for t in (low, high, scale))
    slack = scale * 0.51  # the largest weight stands half a step above the last of 255 levels
    beyond = (x < low - slack) | (x > high + slack)
    return float(beyond.float().mean())


# -- graph -----------------------------------------------------------------------------------------------
def graph_of(qmodel: Any) -> dict[str, Any]:
    """Nodes in the order they run, and their readers; nodes that only carry a quantizer are left out."""
    from sparsebit.graph.ops import called_module
    from sparsebit.quantization.layers import carries_for

    gm = qmodel.model
    shown: dict[Any, int] = {}
    carried: dict[Any, list[Any]] = {}
    nodes: list[dict[str, str]] = []
    edges: list[list[int]] = []
    for node in gm.graph.nodes:
        sources: list[Any] = []
        for n in node.all_input_nodes:
            sources.extend(carried.get(n, [n]))
        module = called_module(node, gm)
        if node.op == "get_attr" or (module is not None and carries_for(node) is not None):
            carried[node] = sources
            continue
        shown[node] = len(nodes)
        nodes.append({"name": node.name, "op": _op(node, module)})
        edges += [[shown[s], shown[node]] for s in dict.fromkeys(sources)]
    text = io.StringIO()
    qmodel.dump_mermaid(text)
    return {"nodes": nodes, "edges": edges, "mermaid": text.getvalue()}


def _op(node: Any, module: Any) -> str:
    if node.op in ("placeholder", "output"):
        return "input" if node.op == "placeholder" else "output"
    if module is not None:
        name = type(module).__name__
    else:
        name = getattr(node.target, "__name__", str(node.target))
    if name[:1] == "Q" and name[1:2].isupper():
        return name[1:]
    return name
