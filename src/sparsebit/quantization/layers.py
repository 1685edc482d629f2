"""The layers of a QuantModel as its tools see them: what quantizes together, under the name SPECIFIC knows."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx, nn

from sparsebit.graph.ops import called_module, module_of
from sparsebit.graph.run.calls import Call, device_of
from sparsebit.graph.run.modes import evaluating
from sparsebit.graph.run.signature import signature_of
from sparsebit.quantization.modules import Opr, QuantOpr
from sparsebit.quantization.modules.unary import QIdentity
from sparsebit.quantization.quantizers import Mode, Quantizer


@dataclass(frozen=True)
class Layer:
    """An op with quantizers. `inside` is its path below the module that `node` calls; "" for that module itself."""

    name: str
    path: str
    node: fx.Node
    inside: str
    module: QuantOpr


def layers(gm: fx.GraphModule) -> Iterator[Layer]:
    """Every QuantOpr of the graph, also inside islands and inside QModules made of others, each once."""
    seen: set[nn.Module] = set()
    for node in gm.graph.nodes:
        if node.op != "call_module":
            continue
        for inside, module in module_of(node, gm).named_modules():
            if isinstance(module, QuantOpr) and module not in seen:
                seen.add(module)
                inside = below_root(inside)
                yield Layer(*names_of(node, inside), node, inside, module)


def below_root(inside: str) -> str:
    """The path inside a model that stayed whole: graph.islands.Whole holds that model as `root`."""
    if inside == "root":
        return ""
    return inside.removeprefix("root.")


def names_of(node: fx.Node, inside: str = "") -> tuple[str, str]:
    """Name and path of an op, as SPECIFIC matches them."""
    path = str(node.meta.get("path", node.name))
    if not inside:
        return node.name, path
    # in a model that stayed whole, names start at its layers
    prefix = ""
    if path:
        prefix = f"{node.name}_"
    return prefix + inside.replace(".", "_"), f"{path}.{inside}".lstrip(".")


def is_active(quantizer: Quantizer | None) -> bool:
    """Will it quantize once it is calibrated and switched on?"""
    return quantizer is not None and not quantizer.absorbed and not quantizer.unused


def active_quantizers(module: nn.Module) -> list[Quantizer]:
    """The active quantizers of one QuantOpr, that of the weight first."""
    if not isinstance(module, QuantOpr):
        return []
    return [q for q in (module.weight_quantizer, module.input_quantizer) if q is not None and is_active(q)]


def input_carriers(node: fx.Node, gm: fx.GraphModule) -> list[tuple[fx.Node, QIdentity]]:
    """The QIdentities that were put in front of `node` to carry the quantizers of its inputs."""
    found = []
    for source in node.all_input_nodes:
        module = called_module(source, gm)
        if isinstance(module, QIdentity) and carries_for(source) is node:
            found.append((source, module))
    return found


def carries_for(node: fx.Node) -> fx.Node | None:
    """The op whose input a QIdentity node carries, or None for an identity of the user's own."""
    return next((user for user in node.users if node.name.startswith(f"{user.name}_identity")), None)


def moves_values(module: nn.Module | None) -> bool:
    """Is it a QModule that only moves values, or picks some?"""
    return isinstance(module, Opr) and module.moves_values


def as_calls(gm: fx.GraphModule, batches: Iterable[Any]) -> list[Call]:
    """Arguments of one forward for each batch, on the model's device."""
    signature = signature_of(gm)
    device = device_of(gm)
    return [Call.of(batch, signature).to(device) for batch in batches]


@contextmanager
def undisturbed(gm: nn.Module) -> Iterator[None]:
    """Eval mode, every quantizer off, no gradients, no fused attention; all of it comes back, also on error."""
    modes = {m: m.mode for m in gm.modules() if isinstance(m, Quantizer)}
    fast = torch.backends.mha.get_fastpath_enabled()
    try:
        for quantizer in modes:
            quantizer.mode = Mode.FLOAT
        torch.backends.mha.set_fastpath_enabled(False)  # one opaque op, and no submodule is called
        with evaluating(gm), torch.no_grad():
            yield
    finally:
        torch.backends.mha.set_fastpath_enabled(fast)
        for quantizer, mode in modes.items():
            quantizer.mode = mode


@contextmanager
def switched_on(quantizers: Iterable[Quantizer]) -> Iterator[None]:
    """These quantize inside the block."""
    saved = [(q, q.mode) for q in quantizers]
    try:
        for quantizer, _ in saved:
            quantizer.enable_quant()
        yield
    finally:
        for quantizer, mode in saved:
            quantizer.mode = mode


def bits_label(gm: fx.GraphModule) -> Callable[[fx.Node], str]:
    """`W8 A8` for a node that quantizes, "" for others: what `to_mermaid` shows."""

    def label(node: fx.Node) -> str:
        module = called_module(node, gm)
        if module is None:
            return ""
        found: dict[Quantizer, None] = {}
        for m in module.modules():
            found.update(dict.fromkeys(active_quantizers(m)))
        return " ".join(dict.fromkeys(f"{q.cfg.letter}{q.bit}" for q in found))

    return label
