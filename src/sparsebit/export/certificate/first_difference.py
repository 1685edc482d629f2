"""Of a file that differs from its model: where it starts.

torch's exporter names the values of the ONNX graph like those of the exported program. So the program runs op by op
beside the file, whose optimisations are off. The result is the first value of one name that differs.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import Tensor, fx, nn
from torch.utils import _pytree as pytree

from sparsebit.export.certificate import runtime
from sparsebit.export.certificate.end_to_end import check_output
from sparsebit.export.certificate.runtime import Array
from sparsebit.export.onnx.to_onnx import modules_around
from sparsebit.graph.run.calls import Call
from sparsebit.graph.run.interpreter import Runner


def first_difference(model: nn.Module, program: Any, file: Path, call: Call, rounding: float) -> str:
    """`program` is the ExportedProgram that `file` was made from; the model is in eval mode."""
    import onnx

    graph = onnx.load(str(file), load_external_data=False).graph
    outputs = [o.name for o in graph.output]
    module: fx.GraphModule = program.module(check_guards=False)
    wanted = {name for node in graph.node for name in node.output}
    values: dict[str, Array] = {}

    def keep(node: fx.Node, value: Any) -> None:
        if isinstance(value, Tensor) and node.name in wanted and not value.is_complex():
            values[node.name] = runtime.torch_outputs(value)[0]

    found = Runner(module, keep).run_flat(pytree.tree_leaves(call.copy()))
    mine = runtime.torch_outputs(found)
    if check_output(runtime.torch_outputs(call.run(model)), mine) > rounding:
        return (
            "the tracing of the model, before ONNX: its code computes something else when torch.export runs it. "
            "Sizes or values of tensors may decide what it does: write that with torch.where or torch.cond"
        )
    theirs = runtime.run_bare(file, list(values), *call)
    for node in module.graph.nodes:
        if node.name not in values:
            continue
        error = check_output([values[node.name]], [theirs[node.name]])
        if error > rounding:
            where = (modules_around(node) or ["the model's own forward"])[-1]
            return f"{where}: its value {node.name} is off by {error:.2g} of the largest value"
    if check_output(mine, [theirs[name] for name in outputs]) > rounding:
        return f"the last op before the outputs {', '.join(outputs)}"
    return "an optimisation of onnxruntime: without them the file agrees"


__all__ = ["first_difference"]
