"""How much each layer loses by quantization.

async: the layer alone is quantized and gets the inputs it has in the float model. sync: everything before it is
quantized too, so errors add up along the way. Both walk the graph once, node by node, all batches together.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.nn import functional as F
from torch.utils import _pytree as pytree

from sparsebit.graph.ops import module_of
from sparsebit.graph.run.calls import Call
from sparsebit.graph.run.lanes import Lane, advance
from sparsebit.quantization.layers import as_calls, is_active, names_of, switched_on, undisturbed
from sparsebit.quantization.modules import QuantOpr
from sparsebit.quantization.quantizers import Quantizer

Checker = Callable[[Tensor, Tensor], Any]


class QuantizationErrorProfiler:
    """`apply` gives {name: error} for every layer with a quantizer, and for every island as a whole."""

    def __init__(self, model: fx.GraphModule):
        self.model = model

    def apply(self, data: Any, checker: Checker = F.mse_loss, is_async: bool = True) -> dict[str, Any]:
        """The error of each layer's output, `checker(quantized, float)`, as a mean over batches and calls.

        data     a tensor, a tuple of arguments, a dict of keyword arguments, or an iterable of those.
        checker  any function of two tensors; where a layer gives several, the mean over them is taken.

        Quantizers that are switched on count; if none is, all of them do.
        """
        one = isinstance(data, (Tensor, Mapping, tuple))
        batches = as_calls(self.model, [data] if one else data)
        chosen = chosen_quantizers(self.model)
        with undisturbed(self.model):
            walk = _Walk(self.model, chosen, checker, is_async)
            lanes = [Lane(self.model, batches)]
            if not is_async:
                lanes.append(_QuantizedLane(walk, batches, base=lanes[0]))
            for node in self.model.graph.nodes:
                with walk.watching(node):
                    advance(node, lanes)
        return walk.means()


def chosen_quantizers(model: nn.Module) -> set[Quantizer]:
    """The quantizers that are on; if none is, all that can be."""
    found = [m for m in model.modules() if isinstance(m, Quantizer) and is_active(m)]
    return {q for q in found if q.use_quant} or set(found)


class _QuantizedLane(Lane):
    """The view in which everything is quantized."""

    def __init__(self, walk: _Walk, batches: Sequence[Call], base: Lane):
        super().__init__(walk.gm, batches, base=base, differs=walk.differs)
        self.walk = walk

    def _compute(self, node: fx.Node) -> None:
        with self.walk.quantized(node):
            super()._compute(node)


class _Walk:
    """Compares the two outputs of every layer that a node runs: those of its module and of the modules inside it."""

    def __init__(self, gm: fx.GraphModule, chosen: set[Quantizer], checker: Checker, is_async: bool):
        self.gm = gm
        self.chosen = chosen
        self.checker = checker
        self.is_async = is_async
        self.waiting: dict[str, deque[Any]] = {}  # outputs of one view, until the other has them too
        self.errors: dict[str, list[Any]] = {}
        self.in_quantized_view = False

    def differs(self, node: fx.Node) -> bool:
        return bool(self._quantizers(node))

    def _quantizers(self, node: fx.Node) -> list[Quantizer]:
        if node.op == "call_module":
            return _below(module_of(node, self.gm), self.chosen)
        return []

    @contextmanager
    def quantized(self, node: fx.Node) -> Iterator[None]:
        self.in_quantized_view = True
        try:
            with switched_on(self._quantizers(node)):
                yield
        finally:
            self.in_quantized_view = False

    @contextmanager
    def watching(self, node: fx.Node) -> Iterator[None]:
        with ExitStack() as handles:
            add = lambda handle: handles.callback(handle.remove)
            if node.op == "call_module":
                root = module_of(node, self.gm)
            else:
                root = nn.Module()
            for inside, module in root.named_modules():
                quantizers = _below(module, self.chosen)
                if not quantizers or (inside and not isinstance(module, QuantOpr)):
                    continue
                name = names_of(node, inside.removeprefix("root."))[0]
                if self.is_async:
                    ahead = self._run_ahead(name, quantizers)
                    add(module.register_forward_pre_hook(ahead, with_kwargs=True))
                add(module.register_forward_hook(self._compare(name)))
            yield

    def _run_ahead(self, name: str, quantizers: list[Quantizer]) -> Callable[..., None]:
        """Before a layer runs in float, run it quantized on a copy of the same inputs."""

        def hook(module: nn.Module, args: Any, kwargs: Any) -> None:
            if self.in_quantized_view:
                return
            self.in_quantized_view = True
            try:
                with switched_on(quantizers):
                    self._queue(name).append(Call(args, kwargs).run(module))
            finally:
                self.in_quantized_view = False

        return hook

    def _compare(self, name: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: Any, out: Any) -> None:
            queue = self._queue(name)
            if self.is_async and not self.in_quantized_view:
                self._note(name, queue.popleft(), out)
            elif not self.is_async and self.in_quantized_view:
                self._note(name, out, queue.popleft())
            elif not self.is_async:  # a copy: later code inside an island may write into it
                queue.append(pytree.tree_map_only(Tensor, torch.clone, out))

        return hook

    def _queue(self, name: str) -> deque[Any]:
        return self.waiting.setdefault(name, deque())

    def _note(self, name: str, quantized: Any, real: Any) -> None:
        pairs = zip(pytree.tree_leaves(quantized), pytree.tree_leaves(real))
        values = [self.checker(q, r) for q, r in pairs if isinstance(r, Tensor) and r.is_floating_point()]
        if values:
            self.errors.setdefault(name, []).append(_mean(values))

    def means(self) -> dict[str, Any]:
        return {name: _mean(values) for name, values in self.errors.items()}


def _below(module: nn.Module, chosen: set[Quantizer]) -> list[Quantizer]:
    return [m for m in module.modules() if isinstance(m, Quantizer) and m in chosen]


def _mean(values: list[Any]) -> Any:
    if len(values) == 1:
        return values[0]
    return sum(values[1:], values[0]) / len(values)
