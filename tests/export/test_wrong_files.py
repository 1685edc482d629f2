"""Files made wrong on purpose: each is refused, and the first failure names the quantizer or output nearest to the
change. Files that are written otherwise but compute the same are accepted."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import sparsebit
from sparsebit import QuantModel
from sparsebit.errors import ExportError

onnx = pytest.importorskip("onnx")
pytest.importorskip("onnxruntime")
pytest.importorskip("onnxscript")
from onnx import TensorProto, helper, numpy_helper  # noqa: E402

Model = Any  # onnx.ModelProto
Change = Callable[[Model], object]


class Net(nn.Module):
    """Residual, depthwise, concatenated and pooled parts, a softmax over bins, and three outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.norm = nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8)
        self.body = nn.Conv2d(8, 8, 3, padding=1)
        self.depthwise = nn.Conv2d(8, 8, 3, padding=1, groups=8)
        self.left, self.right, self.mix = nn.Conv2d(8, 8, 1), nn.Conv2d(8, 8, 1), nn.Conv2d(16, 8, 1)
        self.bins, self.project = nn.Conv2d(8, 8, 1), nn.Conv2d(4, 2, 1)
        self.hidden, self.classes = nn.Linear(8, 8), nn.Linear(8, 5)
        self.layer_norm, self.embed = nn.LayerNorm(8), nn.Linear(8, 6)
        self.register_buffer("anchor", torch.linspace(-1, 1, 16).view(4, 4))

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        x = F.max_pool2d(F.relu(self.norm(self.stem(x))), 2)
        x = F.leaky_relu(self.depthwise(x + self.body(x)), 0.2)
        x = F.relu6(self.mix(torch.cat([self.left(x), F.relu(self.right(x))], 1)))
        bins = self.bins(x).view(-1, 4, 2, 16).softmax(1)
        pooled = x.mean((2, 3))
        return {
            "boxes": self.project(bins).reshape(-1, 4, 4, 4) + self.anchor,
            "scores": self.classes(torch.tanh(self.hidden(pooled))),
            "embedding": self.embed(self.layer_norm(pooled)),
        }


class Exported(NamedTuple):
    qmodel: QuantModel
    file: bytes
    batches: list[Tensor]  # one image; four images, two of them with values outside of the calibration range

    def verify(self, change: Change, path: Path) -> Any:
        model = onnx.load_model_from_string(self.file)
        change(model)
        onnx.save(model, str(path))
        return sparsebit.verify(path, self.qmodel, self.batches)


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Exported]:
    torch.manual_seed(0)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # on tensors as small as these, more threads only wait for each other
    net = Net().eval()
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.mul_(1.5)
    data = [torch.randn(4, 3, 8, 8) for _ in range(4)]
    qmodel = sparsebit.quantize(net, data)
    path = tmp_path_factory.mktemp("exported") / "m.onnx"
    qmodel.export_onnx(data[0], str(path), dynamic_axes={"x": {0: "batch"}})
    yield Exported(qmodel, path.read_bytes(), [data[0][:1], torch.cat([data[1][:2], 4 * data[2][:2]])])
    torch.set_num_threads(threads)


# -- parts of a graph --------------------------------------------------------------------------------------
def node(model: Model, output: str) -> Any:
    """The node that computes `output`."""
    return next(n for n in model.graph.node if output in n.output)


def quantizer_node(model: Model, name: str) -> Any:
    """<quantizer>/Q or <quantizer>/DQ."""
    return next(n for n in model.graph.node if n.name == name)


def constant(model: Model, name: str) -> np.ndarray:
    return numpy_helper.to_array(next(t for t in model.graph.initializer if t.name == name)).copy()


def store(model: Model, name: str, value: Any) -> str:
    found = [t for t in model.graph.initializer if t.name == name]
    for tensor in found:
        model.graph.initializer.remove(tensor)
    model.graph.initializer.append(numpy_helper.from_array(np.asarray(value), name))
    return name


def edit(name: str, function: Callable[[np.ndarray], Any]) -> Change:
    """Replace a constant."""

    def change(model: Model) -> None:
        store(model, name, function(constant(model, name)))

    return change


def put(name: str, index: Any, value: float) -> Change:
    """Replace some entries of a constant."""

    def change(model: Model) -> None:
        array = constant(model, name)
        array[index] = value
        store(model, name, array)

    return change


def attribute(output: str, **values: Any) -> Change:
    def change(model: Model) -> None:
        found = node(model, output)
        kept = [a for a in found.attribute if a.name not in values]
        del found.attribute[:]
        found.attribute.extend([*kept, *(helper.make_attribute(k, v) for k, v in values.items())])

    return change


def becomes(output: str, op: str, **attributes: Any) -> Change:
    """Another op in place of the one that computes `output`."""

    def change(model: Model) -> None:
        found = node(model, output)
        found.op_type = op
        del found.attribute[:]
        found.attribute.extend(helper.make_attribute(k, v) for k, v in attributes.items())

    return change


def reads(output: str, *inputs: str) -> Change:
    """Other inputs for the node that computes `output`."""

    def change(model: Model) -> None:
        node(model, output).input[:] = inputs

    return change


def both(*changes: Change) -> Change:
    def change(model: Model) -> None:
        for one in changes:
            one(model)

    return change


def splice(model: Model, value: str, feed: bool) -> tuple[str, str, list[Any], list[Any]]:
    """Cut `value` in two: what is computed, what is read, and the nodes before and behind. `feed`: an input."""
    nodes, changed = list(model.graph.node), f"{value}/changed"
    if feed:
        for n in nodes:
            n.input[:] = [changed if name == value else name for name in n.input]
        return value, changed, [], nodes
    producer = node(model, value)
    producer.output[:] = [changed if name == value else name for name in producer.output]
    at = 1 + next(i for i, n in enumerate(nodes) if changed in n.output)
    return changed, value, nodes[:at], nodes[at:]


def behind(value: str, *steps: tuple[str, list[Any], dict[str, Any]], feed: bool = False) -> Change:
    """Ops (op, constants, attributes) between the node that computes `value` and those that read it."""

    def change(model: Model) -> None:
        source, target, before, after = splice(model, value, feed)
        for i, (op, inputs, attributes) in enumerate(steps):
            names = [
                v if isinstance(v, str) else store(model, f"{value}/{i}_{j}", v) for j, v in enumerate(inputs)
            ]
            out = target if i == len(steps) - 1 else f"{value}/step{i}"
            before.append(helper.make_node(op, [source, *names], [out], **attributes))
            source = out
        del model.graph.node[:]
        model.graph.node.extend([*before, *after])

    return change


def apart(node_name: str, index: int, function: Callable[[np.ndarray], Any]) -> Change:
    """A constant that two nodes read: changed for one of them."""

    def change(model: Model) -> None:
        found = quantizer_node(model, node_name)
        value = function(constant(model, found.input[index]))
        found.input[index] = store(model, f"{node_name}/own_{index}", value)

    return change


def where(value: str, condition: list[Any], wrong: list[Any], feed: bool = False) -> Change:
    """`value` is computed wrongly where the condition on the input x or on itself holds."""

    def change(model: Model) -> None:
        source, target, before, after = splice(model, value, feed)
        names = {"x": "x", "value": source}
        for what, steps in (("condition", condition), ("wrong", wrong)):
            for i, (op, *inputs) in enumerate(steps):
                read = [
                    names[k] if isinstance(k, str) else store(model, f"{value}/{what}{i}_{j}", k)
                    for j, k in enumerate(inputs)
                ]
                names[f"{what}{i}"] = names[what] = f"{value}/{what}{i}"
                before.append(helper.make_node(op, read, [names[what]]))
        before.append(helper.make_node("Where", [names["condition"], names["wrong"], source], [target]))
        del model.graph.node[:]
        model.graph.node.extend([*before, *after])

    return change


f32 = np.float32


def i64(value: Any) -> np.ndarray:
    return np.asarray(value, np.int64)


LARGER_BATCH = [("Shape", "x"), ("Gather", "condition0", i64(0)), ("Greater", "condition1", i64(1))]
FAR = [("Abs", "value"), ("Greater", "condition0", f32(4.0))]  # images were calibrated up to 3.7
FAR_INPUT = [
    ("Abs", "x"),
    ("ReduceMax", "condition0"),
    ("Squeeze", "condition1"),
    ("Greater", "condition2", f32(4.0)),
]


def pairwise_127(codes: np.ndarray) -> np.ndarray:
    codes[0] = 127  # two products of 255 * 127 do not fit into 16 bits
    return codes


def one_in_a_thousand(codes: np.ndarray) -> np.ndarray:
    codes.reshape(-1)[:: max(codes.size, 1000)] ^= 1
    return codes


def swap_constants(a: str, b: str) -> Change:
    def change(model: Model) -> None:
        first, second = constant(model, a), constant(model, b)
        store(model, a, second)
        store(model, b, first)

    return change


def swap_outputs(model: Model) -> None:
    outputs = list(model.graph.output)
    del model.graph.output[:]
    model.graph.output.extend([outputs[0], outputs[2], outputs[1]])


def swap_values_of_outputs(model: Model) -> None:
    """The names stay, the values change places."""
    first, second = node(model, "scores"), node(model, "embedding")
    first.output[0], second.output[0] = "embedding", "scores"
    for output in model.graph.output:
        del output.type.tensor_type.shape.dim[:]


def drop_output(model: Model) -> None:
    del model.graph.output[2]


def add_output(model: Model) -> None:
    model.graph.output.append(helper.make_tensor_value_info("tanh", TensorProto.FLOAT, None))


def cast_output(kind: int) -> Change:
    def change(model: Model) -> None:
        behind("scores", ("Cast", [], {"to": kind}))(model)
        model.graph.output[1].type.tensor_type.elem_type = kind

    return change


def without(output: str) -> Change:
    """A node is taken out: its readers read its first input."""

    def change(model: Model) -> None:
        found = node(model, output)
        for n in model.graph.node:
            n.input[:] = [found.input[0] if name == output else name for name in n.input]
        model.graph.node.remove(found)

    return change


def unquantized(after: str, before: str, *readers: str) -> Change:
    """Some ops read the value in front of a quantizer."""

    def change(model: Model) -> None:
        for reader in readers:
            found = node(model, reader)
            found.input[:] = [before if name == after else name for name in found.input]

    return change


def as_int8(model: Model) -> None:
    """The codes of the model, read as int8: those from 128 on become negative."""
    for name in ("depthwise.input_quantizer/Q", "depthwise.input_quantizer/DQ"):
        apart(name, 2, lambda z: z.astype(np.int8))(model)


def grouped(model: Model) -> None:
    store(model, "body.weight_quantizer/codes", constant(model, "body.weight_quantizer/codes")[:, :4])
    attribute("conv2d_1", group=2)(model)


WRONG: dict[str, tuple[Change, str]] = {  # what is changed, and what the first failure names
    # scales and zero points
    "scale of an activation doubled": (edit("left.input_quantizer/scale", lambda s: s * 2), "left.input_q"),
    "scale doubled where codes are read": (
        apart("left.input_quantizer/DQ", 1, lambda s: s * 2),
        "left.input_quantizer",
    ),
    "scale a thousandth too large where codes are read": (
        apart("left.input_quantizer/DQ", 1, lambda s: s * f32(1.001)),
        "left.input_quantizer",
    ),
    "scale a hundredth too large at a copy": (
        apart("body.input_quantizer/DQ", 1, lambda s: s * f32(1.01)),
        "body.input_quantizer",
    ),
    "scale of the input one part in 500 too large": (
        edit("stem.input_quantizer/scale", lambda s: s * f32(1.002)),
        "stem.input_quantizer",
    ),
    "scale of a weight doubled": (edit("body.weight_quantizer/scale", lambda s: s * 2), "body.weight_q"),
    "scale of one channel of a weight": (put("mix.weight_quantizer/scale", 3, 0.01), "mix.weight_quantizer"),
    "NaN in the scale of a weight": (put("left.weight_quantizer/scale", 0, np.nan), "left.weight_quantizer"),
    "infinite scale of an activation": (
        edit("leaky_relu.input_quantizer/scale", lambda s: f32(np.inf)),
        "leaky_relu.input_quantizer",
    ),
    "zero point off by one": (
        edit("depthwise.input_quantizer/zero_point", lambda z: z + np.uint8(1)),
        "depthwise.input_quantizer",
    ),
    "zero point off by one where codes are read": (
        apart("depthwise.input_quantizer/DQ", 2, lambda z: z + np.uint8(1)),
        "depthwise.input_quantizer",
    ),
    "zero point of a weight off by one": (
        put("right.weight_quantizer/zero_point", 5, 1),
        "right.weight_quantizer",
    ),
    "codes of an activation as int8": (as_int8, "depthwise.input_quantizer"),
    "fewer codes than 256": (
        behind("left.input_quantizer/Q/out", ("Clip", [np.uint8(0), np.uint8(200)], {})),
        "left.input_quantizer",
    ),
    "rounding down": (
        behind("x", ("Sub", [f32(0.0133)], {}), feed=True),
        "stem.input_quantizer",
    ),
    # weights and biases
    "a code in a thousand weights": (
        edit("body.weight_quantizer/codes", one_in_a_thousand),
        "body.weight_quantizer",
    ),
    "weights that saturate": (edit("body.weight_quantizer/codes", pairwise_127), "body.weight_quantizer"),
    "weights transposed": (
        edit("left.weight_quantizer/codes", lambda w: w.transpose(1, 0, 2, 3)),
        "left.weight_quantizer",
    ),
    "kernel turned round": (
        edit("depthwise.weight_quantizer/codes", lambda w: w[:, :, ::-1, ::-1]),
        "depthwise.weight_quantizer",
    ),
    "rows of a weight in another order": (
        edit("embed.weight_quantizer/codes", lambda w: w[[1, 0, 2, 3, 4, 5]]),
        "embed.weight_quantizer",
    ),
    "weights as uint8": (
        both(
            edit("left.weight_quantizer/codes", lambda w: w.view(np.uint8)),
            edit("left.weight_quantizer/zero_point", lambda z: z.view(np.uint8)),
        ),
        "left.weight_quantizer",
    ),
    "weights of two layers swapped": (
        swap_constants("left.weight_quantizer/codes", "right.weight_quantizer/codes"),
        "left.weight_quantizer",
    ),
    "axis of the scales of a weight": (
        attribute("body.weight_quantizer/DQ/out", axis=1),
        "body.weight_quantizer",
    ),
    "bias dropped": (
        reads("conv2d_1", "body.input_quantizer#1/DQ/out", "body.weight_quantizer/DQ/out"),
        "add_identity1.input_quantizer",
    ),
    "bias zero": (edit("hidden.bias/codes", np.zeros_like), "hidden.bias"),
    "bias off by a code": (edit("mix.bias/codes", lambda c: c + np.eye(1, 8, dtype=c.dtype)[0]), "mix.bias"),
    "bias off by a code in front of an output": (edit("classes.bias/codes", lambda c: c + 1), "classes.bias"),
    "bias on another grid": (edit("mix.bias/scale", lambda s: s * f32(1.5)), "mix.bias"),
    "bias on a grid a hundred times as coarse": (
        both(
            edit("mix.bias/codes", lambda c: np.rint(c / 100).astype(np.int32)),
            edit("mix.bias/scale", lambda s: s * 100),
        ),
        "mix.bias",
    ),
    "biases of two layers swapped": (
        reads("conv2d_3", "left.input_quantizer/DQ/out", "left.weight_quantizer/DQ/out", "stem.bias/DQ/out"),
        "mix.input_quantizer",
    ),
    # attributes of ops
    "pads": (attribute("conv2d", pads=[2, 1, 0, 1]), "body.input_quantizer"),
    "stride": (attribute("conv2d", strides=[2, 2], pads=[4, 4, 5, 5]), "body.input_quantizer"),
    "dilation": (attribute("conv2d", dilations=[2, 2], pads=[2, 2, 2, 2]), "body.input_quantizer"),
    "groups": (grouped, "body.weight_quantizer"),
    "window of a pool": (attribute("max_pool2d", kernel_shape=[1, 1]), "body.input_quantizer"),
    "MaxPool became AveragePool": (
        becomes("max_pool2d", "AveragePool", kernel_shape=[2, 2], strides=[2, 2]),
        "body.input_quantizer",
    ),
    "mean became maximum": (becomes("node_mean/pool/out", "GlobalMaxPool"), "hidden.input_quantizer"),
    "slope of LeakyRelu": (attribute("leaky_relu", alpha=0.21), "left.input_quantizer"),
    "LeakyRelu became Relu": (becomes("leaky_relu", "Relu"), "left.input_quantizer"),
    "LeakyRelu lost": (becomes("leaky_relu", "Identity"), "left.input_quantizer"),
    "Relu lost": (without("mix.input_quantizer#1/Clip/out"), "mix.input_quantizer"),
    "softmax over another axis": (attribute("softmax", axis=2), "project.input_quantizer"),
    "softmax became logarithm": (becomes("softmax", "LogSoftmax", axis=1), "project.input_quantizer"),
    "tanh became sigmoid": (becomes("tanh", "Sigmoid"), "classes.input_quantizer"),
    "epsilon of a norm": (attribute("layer_norm", epsilon=1e-3), "embed.input_quantizer"),
    "weight of a norm": (put("layer_norm.weight", 2, 1.4), "embed.input_quantizer"),
    "transB": (attribute("linear", transB=0), "tanh.input_quantizer"),
    "alpha of Gemm": (attribute("linear", alpha=0.5), "tanh.input_quantizer"),
    "beta of Gemm in front of an output": (attribute("scores", beta=0.0), "the output scores"),
    # how ops are joined
    "concat in another order": (
        reads("cat", "mix.input_quantizer#1/DQ/out", "mix.input_quantizer/DQ/out"),
        "mix.input_quantizer",
    ),
    "an operand of Add replaced": (
        reads("add_42", "body.input_quantizer#1/DQ/out", "body.input_quantizer#1/DQ/out"),
        "depthwise.input_quantizer",
    ),
    "Add became Sub": (becomes("add_42", "Sub"), "depthwise.input_quantizer"),
    "Add became Max": (becomes("add_42", "Max"), "depthwise.input_quantizer"),
    "a constant": (put("anchor", (2, 1), 0.5), "add_1_identity1.input_quantizer"),
    "a Reshape that mixes": (
        both(
            edit("val_11", lambda _: np.array([-1, 2, 4, 16])),
            behind("view", ("Transpose", [], {"perm": [0, 2, 1, 3]})),
        ),
        "project.input_quantizer",
    ),
    "height and width swapped": (
        behind("conv2d_5", ("Transpose", [], {"perm": [0, 1, 3, 2]})),
        "bins.input_quantizer",
    ),
    "a quantizer that nobody reads": (
        unquantized("bins.input_quantizer/DQ/out", "conv2d_5", "node_conv2d_6/as_product/last/out"),
        "project.input_quantizer",
    ),
    "rounded once more": (behind("tanh", ("Cast", [], {"to": 16}), ("Cast", [], {"to": 1})), "classes.input"),
    "input in another channel order": (
        behind("x", ("Gather", [np.array([2, 1, 0])], {"axis": 1}), feed=True),
        "stem.input_quantizer",
    ),
    "input normalised once more": (behind("x", ("Mul", [f32(1.02)], {}), feed=True), "stem.input_quantizer"),
    # outputs
    "channels of an output permuted": (
        behind("boxes", ("Gather", [np.array([0, 2, 1, 3])], {"axis": 1})),
        "the output boxes",
    ),
    "one output of three a little too large": (
        behind("scores", ("Mul", [f32(1.001)], {})),
        "the output scores",
    ),
    "an output that does not depend on the input": (
        behind("embedding", ("Mul", [f32(0)], {})),
        "the output embedding",
    ),
    "an output as probabilities": (behind("scores", ("Softmax", [], {"axis": 1})), "the output scores"),
    "an output in half precision": (cast_output(TensorProto.FLOAT16), "the output scores"),
    "an output in double precision": (cast_output(TensorProto.DOUBLE), "the output scores"),
    "an output with another shape": (
        behind("scores", ("Unsqueeze", [np.array([1])], {})),
        "the output scores",
    ),
    "an output that is NaN in one place": (
        behind("scores", ("Add", [np.array([0, 0, np.nan, 0, 0], f32)], {})),
        "the output scores",
    ),
    "two outputs in another order": (swap_outputs, "the output embedding"),
    "the values of two outputs swapped": (swap_values_of_outputs, "the output scores"),
    "an output too many": (add_output, "the number of outputs"),
    "an output missing": (drop_output, "the number of outputs"),
    # wrong for some inputs only
    "wrong for batches above 1": (
        where("embedding", LARGER_BATCH, [("Neg", "value")]),
        "the output embedding",
    ),
    "wrong inside for batches above 1": (
        where("conv2d_2", LARGER_BATCH, [("Mul", "value", f32(0.98))]),
        "leaky_relu.input_quantizer",
    ),
    "images of a batch in another order": (
        behind("conv2d_2", ("Slice", [i64([-1]), i64([-9]), i64([0]), i64([-1])], {})),
        "leaky_relu.input_quantizer",
    ),
    "input outside of the calibration range": (
        where("x", FAR, [("Neg", "value")], feed=True),
        "stem.input_quantizer",
    ),
    "an output for input outside of the calibration range": (
        where("scores", FAR_INPUT, [("Neg", "value")]),
        "the output scores",
    ),
}


@pytest.mark.parametrize("kind", WRONG)
def test_a_wrong_file_is_refused_where_it_is_wrong(exported, kind, tmp_path):
    change, first = WRONG[kind]
    report = exported.verify(change, tmp_path / "wrong.onnx")
    assert not report.ok
    assert report.certificate.failures()[0].startswith(first), report.certificate.failures()[:3]


# -- right files -------------------------------------------------------------------------------------------
def untouched(model: Model) -> None:
    pass


def other_order(model: Model) -> None:
    """Constants first: every DequantizeLinear of a weight or bias in front."""
    nodes = list(model.graph.node)
    constants = {tensor.name for tensor in model.graph.initializer}
    nodes.sort(key=lambda n: not set(n.input) <= constants)  # stable
    del model.graph.node[:]
    model.graph.node.extend(nodes)
    tensors = sorted(model.graph.initializer, key=lambda t: t.name, reverse=True)
    del model.graph.initializer[:]
    model.graph.initializer.extend(tensors)


def renamed(model: Model) -> None:
    """Values that the metadata does not name, and all nodes."""
    named = json.loads(next(p.value for p in model.metadata_props if p.key == "sparsebit.lowered"))
    kept = {i.name for i in (*model.graph.input, *model.graph.output)}
    kept |= {name for site in named for name in site if isinstance(name, str)}
    kept |= {f"{name}/DQ/out" for name in kept}
    new = lambda name: name if name in kept or not name else f"other/{name}"
    for n in model.graph.node:
        n.name = ""
        n.input[:] = map(new, n.input)
        n.output[:] = map(new, n.output)
    for tensor in model.graph.initializer:
        tensor.name = new(tensor.name)
    del model.graph.value_info[:]


def metadata_in_another_order(model: Model) -> None:
    props = list(model.metadata_props)
    del model.metadata_props[:]
    model.metadata_props.extend(reversed(props))
    model.metadata_props.add(key="author", value="somebody")


def constants_as_nodes(model: Model) -> None:
    made = [helper.make_node("Constant", [], [t.name], value=t) for t in model.graph.initializer]
    nodes = list(model.graph.node)
    del model.graph.initializer[:], model.graph.node[:]
    model.graph.node.extend([*made, *nodes])


def shifted_to_int8(model: Model) -> None:
    """Codes from -128 on with a zero point that is 128 less: the same values."""
    for name in ("depthwise.input_quantizer/Q", "depthwise.input_quantizer/DQ"):
        apart(name, 2, lambda z: (z.astype(np.int16) - 128).astype(np.int8))(model)


def unused_nodes(model: Model) -> None:
    model.graph.node.append(helper.make_node("Neg", ["scores"], ["nobody"]))


RIGHT: dict[str, Change] = {
    "untouched": untouched,
    "nodes and constants in another order": other_order,
    "inner values and nodes with other names": renamed,
    "metadata in another order": metadata_in_another_order,
    "constants as nodes": constants_as_nodes,
    "Identity inside": behind("conv2d_2", ("Identity", [], {})),
    "Identity in front of an output": behind("scores", ("Identity", [], {})),
    "operands of Add in another order": reads(
        "add_42", "add_identity1.input_quantizer/DQ/out", "body.input_quantizer#1/DQ/out"
    ),
    "codes as int8 with the zero point shifted": shifted_to_int8,
    "a node that nobody reads": unused_nodes,
    "a clip at the ends of the grid": behind(
        "left.input_quantizer/Q/out", ("Clip", [np.uint8(0), np.uint8(255)], {})
    ),
}


@pytest.mark.parametrize("kind", RIGHT)
def test_a_right_file_is_accepted(exported, kind, tmp_path):
    report = exported.verify(RIGHT[kind], tmp_path / "right.onnx")
    assert report.ok, report.certificate.failures()


# -- files that do not run ---------------------------------------------------------------------------------
def metadata(key: str, value: str) -> Change:
    def change(model: Model) -> None:
        next(p for p in model.metadata_props if p.key == key).value = value

    return change


def lost_constant(model: Model) -> None:
    model.graph.initializer.remove(next(t for t in model.graph.initializer if t.name == "val_11"))


def lost_quantizer(model: Model) -> None:
    model.graph.node.remove(quantizer_node(model, "tanh.input_quantizer/DQ"))
    reads("tanh", "linear")(model)


def second_input(model: Model) -> None:
    model.graph.input.append(helper.make_tensor_value_info("y", TensorProto.FLOAT, [1]))
    behind("scores", ("Add", ["y"], {}))(model)


def old_opset(model: Model) -> None:
    model.opset_import[0].version = 5


BROKEN: dict[str, tuple[Change, str]] = {
    "an op that does not exist": (
        becomes("tanh", "Tangent"),
        r"broken\..*onnx: onnxruntime does not load the file: .*Tangent",
    ),
    "a constant is missing": (lost_constant, "does not load the file: .*val_11"),
    "opset too old": (old_opset, "does not load the file"),
    "a shape that does not fit": (
        edit("val_11", lambda _: np.array([-1, 3, 2, 16])),
        "does not run it: .*Reshape",
    ),
    "weight with too few channels": (
        edit("body.weight_quantizer/codes", lambda w: w[:, :5]),
        "does not (load|run)",
    ),
    "a quantizer is missing": (lost_quantizer, r"tanh\.input_quantizer/DQ/out"),
    "an input too many": (second_input, r"has the inputs \['x', 'y'\], but the batch has 1 tensors"),
    "metadata that is cut off": (metadata("sparsebit.lowered", '[["stem.wei'), "metadata"),
}


@pytest.mark.parametrize("kind", BROKEN)
def test_a_file_that_does_not_run_is_refused(exported, kind, tmp_path):
    change, message = BROKEN[kind]
    with pytest.raises(ExportError, match=message):
        exported.verify(change, tmp_path / "broken.onnx")


@pytest.mark.parametrize("content", [b"", b"not a model", None], ids=["empty", "text", "cut off"])
def test_bytes_that_are_no_model(exported, content, tmp_path):
    path = tmp_path / "m.onnx"
    path.write_bytes(exported.file[:-400] if content is None else content)
    with pytest.raises(ExportError, match=r"m\.onnx"):
        sparsebit.verify(path, exported.qmodel, exported.batches)


def test_numbers_beside_the_file(exported, tmp_path):
    path, model = tmp_path / "m.onnx", onnx.load_model_from_string(exported.file)
    for tensor in model.graph.initializer:
        if tensor.name.endswith("/codes"):
            onnx.external_data_helper.set_external_data(tensor, "m.onnx.data")
    onnx.save(model, str(path))
    assert sparsebit.verify(path, exported.qmodel, exported.batches).ok
    (tmp_path / "m.onnx.data").unlink()
    with pytest.raises(ExportError, match=r"m\.onnx\.data, which is missing"):
        sparsebit.verify(path, exported.qmodel, exported.batches)


def test_nothing_to_compare_is_no_certificate(exported, tmp_path):
    path = tmp_path / "m.onnx"
    path.write_bytes(exported.file)
    for nothing in ([], torch.zeros(0, 3, 8, 8)):
        with pytest.raises(ExportError, match="batches"):
            sparsebit.verify(path, exported.qmodel, nothing)
