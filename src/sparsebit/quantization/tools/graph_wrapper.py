"""Legacy: hooks over a graph, and a store that frees a node's output after its last reader: the original's tools for
scripts that walk a GraphModule themselves. Sparsebit's own calibration uses graph/run/lanes.py."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, fx, nn

from sparsebit.quantization.tools.tensor_wrapper import to_cpu, to_detach

__all__ = ["GraphVisitor", "SharedData", "fx_symbolic_trace", "to_cpu", "to_detach"]


def fx_symbolic_trace(model: nn.Module) -> fx.GraphModule:
    if isinstance(model, fx.GraphModule):
        return model
    return fx.symbolic_trace(model)


class SharedData:
    """Outputs by node name, each kept until the last node that reads it is finished; named values on the side."""

    def __init__(self) -> None:
        self.edges: dict[str, list[str]] = {}
        self.output_degrees: dict[str, int] = {}
        self.outputs: dict[str, Any] = {}
        self.values: dict[str, dict[str, Any]] = {}

    def add_node(self, name: str, inputs: list[str | None]) -> None:
        self.edges[name] = [i for i in inputs if i is not None]
        self.output_degrees.setdefault(name, 0)
        for i in self.edges[name]:
            self.output_degrees[i] = self.output_degrees.get(i, 0) + 1

    def finish_node(self, name: str) -> None:
        for i in self.edges[name]:
            self.output_degrees[i] -= 1
        for i in (*self.edges[name], name):
            if self.output_degrees.get(i) == 0:
                del self.output_degrees[i]
                self.outputs.pop(i, None)

    def set_output(self, name: str, value: Any) -> None:
        self.outputs[name] = value

    def get_output(self, name: str) -> Any:
        return self.outputs.get(name)

    def set_value(self, name: str, value_name: str, value: Any) -> None:
        self.values.setdefault(value_name, {})[name] = value

    def get_value(self, name: str, value_name: str) -> Any:
        return self.values.get(value_name, {}).get(name)

    def extract_value(self, value_name: str) -> dict[str, Any]:
        return self.values.pop(value_name, {})

    def extract_node_args(self, args: Any, real_input: Any = None, batch: int | None = None) -> Any:
        """`args` of a node with every Node replaced by its stored output, or by the matching `real_input`."""
        if isinstance(args, fx.Node):
            value = self.get_output(str(args.target))
            value = real_input if value is None else value
            if batch is None or value is None or isinstance(value, Tensor):
                return value
            return value[batch]
        if isinstance(args, dict):
            real = real_input or {}
            return {k: self.extract_node_args(v, real.get(k), batch) for k, v in args.items()}
        if isinstance(args, (list, tuple)):
            if isinstance(real_input, (list, tuple)):
                real = real_input
            else:
                real = [None] * len(args)
            return type(args)([self.extract_node_args(a, r, batch) for a, r in zip(args, real)])
        return args

    extract_node_kwargs = extract_node_args


class GraphVisitor:
    """Calls `hook_wrapper(node=, module=, storage=)` for every op of the graph; the handles it returns live as
    long as the visitor."""

    def __init__(self, model: fx.GraphModule, hook_wrapper: Callable[..., list[Any] | None]):
        self.storage = SharedData()
        self.handles: list[Any] = []
        self.build(model, hook_wrapper)

    def build(self, model: fx.GraphModule, hook_wrapper: Callable[..., list[Any] | None]) -> None:
        """Visit the ops in the order of the graph."""
        for node in model.graph.nodes:
            if node.op in ("placeholder", "output"):
                continue
            target: Any = model
            for part in str(node.target).split(".") if node.op in ("get_attr", "call_module") else []:
                target = getattr(target, part)
            self.storage.add_node(str(node.target), [str(n.target) for n in node.all_input_nodes])
            self.handles += hook_wrapper(node=node, module=target, storage=self.storage) or []

    def close(self) -> None:
        for handle in self.handles:
            handle.remove()
        self.handles.clear()

    def __del__(self) -> None:
        self.close()
