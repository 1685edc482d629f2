"""Of a file that differs from its model: where it starts.

torch's exporter names the values of the ONNX graph like those of the exported program, so the program is run op by
op beside the file, whose optimisations are off, and the first value of one name that differs is named.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.utils import _pytree as pytree

from sparsebit.export.certificate import runtime
from sparsebit.export.certificate.end_to_end import check_output
from sparsebit.export.certificate.runtime import Array
from sparsebit.export.onnx.to_onnx import modules_around
from sparsebit.graph.run.calls import Call


class _Values(fx.Interpreter):
    """Runs an exported program and keeps the values that the file computes too."""

    def __init__(self, module: fx.GraphModule, wanted: set[str]):
        super().__init__(module)
        self.wanted, self.values = wanted, dict[str, Array]()

    def run_node(self, n: fx.Node) -> Any:
        value = super().run_node(n)
        if isinstance(value, Tensor) and n.name in self.wanted and not value.is_complex():
            self.values[n.name] = runtime.torch_outputs(value)[0]
        return value


def first_difference(model: nn.Module, program: Any, file: Path, call: Call, rounding: float) -> str:
    """`program` is the ExportedProgram that `file` was made from; the model is in eval mode."""
    import onnx

    graph = onnx.load(str(file), load_external_data=False).graph
    outputs = [o.name for o in graph.output]
    module: fx.GraphModule = program.module(check_guards=False)
    traced = _Values(module, {name for n in graph.node for name in n.output})
    copy = pytree.tree_map_only(Tensor, torch.clone, call)
    found = traced.run(*pytree.tree_leaves(copy), enable_io_processing=False)
    mine = runtime.torch_outputs(found)
    if check_output(runtime.torch_outputs(call.run(model)), mine) > rounding:
        return (
            "the tracing of the model, before ONNX: its code computes something else when torch.export runs it. "
            "Sizes or values of tensors may decide what it does: write that with torch.where or torch.cond"
        )
    theirs = runtime.run_bare(file, list(traced.values), *call)
    for node in module.graph.nodes:
        if node.name not in traced.values:
            continue
        error = check_output([traced.values[node.name]], [theirs[node.name]])
        if error > rounding:
            where = (modules_around(node) or ["the model's own forward"])[-1]
            return f"{where}: its value {node.name} is off by {error:.2g} of the largest value"
    if check_output(mine, [theirs[name] for name in outputs]) > rounding:
        return f"the last op before the outputs {', '.join(outputs)}"
    return "an optimisation of onnxruntime: without them the file agrees"


__all__ = ["first_difference"]
