"""Rewrites around marks that keep every number, so that a runtime's optimiser finds its integer kernels."""

from __future__ import annotations

from collections import Counter, defaultdict
from typing import Any

import onnx_ir as ir
from onnx_ir.passes.common import TopologicalSortPass

from sparsebit.export.onnx.graph_edit import (
    array_of,
    attribute_of,
    insert,
    is_mark,
    made_by,
    marks_in,
    name_of,
    readers,
    replace,
)
from sparsebit.export.onnx.lowered import Lowered
from sparsebit.export.onnx.marks import DOMAIN, KEY, OP, Mark, Marks

# ops whose output values are values of their first input (Concat: of all inputs); a monotone grid commutes with them
MOVERS = frozenset(
    ["MaxPool", "GlobalMaxPool", "Reshape", "Flatten", "Transpose", "Squeeze", "Unsqueeze", "Concat", "Slice"]
    + ["Gather", "Expand", "Identity", "Split", "DepthToSpace", "SpaceToDepth"]
)


def merge_equal(model: ir.Model, marks: Marks) -> dict[str, str]:
    """Quantizers with the same grid on the same value become one; returns {dropped name: kept name}.

    A quantizer that is called several times stays, and reads what the kept one gives: onnxruntime makes one of both.
    """
    aliases: dict[str, str] = {}
    same: dict[Any, list[ir.Node]] = defaultdict(list)
    calls = Counter(name_of(node) for node in marks_in(model) if not _is_copy(node))
    for node in marks_in(model):
        mark = marks.get(name_of(node))
        if mark is not None and not mark.is_weight:
            clip = node.metadata_props.get("clip")
            same[id(node.inputs[0]), clip, _grid(mark)].append(node)
    for nodes in same.values():
        first = nodes[0]
        kept = min(nodes, key=lambda node: (_is_copy(node), calls[name_of(node)] > 1))
        if kept is not first:
            assert kept.graph is not None
            kept.graph.remove(kept)
            first.graph.insert_before(first, [kept])  # type: ignore[union-attr]
        if any("hoisted" in node.metadata_props for node in nodes):
            kept.metadata_props["hoisted"] = "1"
        for node in nodes:
            if node is kept:
                continue
            if not _is_copy(node) and calls[name_of(node)] > 1:
                node.replace_input_with(0, kept.outputs[0])
                node.metadata_props["hoisted"] = "1"
                node.metadata_props.pop("clip", None)
                continue
            if not _is_copy(node):
                aliases[name_of(node)] = name_of(kept)
            replace(node, kept.outputs[0])
    return aliases


def _is_copy(node: ir.Node) -> bool:
    return "copy" in node.metadata_props


def _grid(mark: Mark) -> Any:
    params = (mark.qparams.scale, mark.qparams.zero_point)
    return mark.spec, tuple(tuple(p.detach().flatten().tolist()) for p in params)


def mean_to_pool(model: ir.Model) -> int:
    """ReduceMean over height and width is GlobalAveragePool, which has an integer kernel."""
    changed = 0
    for node in list(model.graph):
        x = node.inputs[0] if node.op_type == "ReduceMean" else None
        axes = None
        if x is not None and len(node.inputs) > 1:
            axes = array_of(node.inputs[1])
        if x is None or axes is None or x.shape is None or len(x.shape) != 4:
            continue
        if sorted(int(a) % 4 for a in axes.flatten()) != [2, 3]:
            continue
        keep = attribute_of(node, "keepdims", 1)
        pooled = insert(node, "GlobalAveragePool", [x], f"{node.name}/pool")
        pooled.shape = ir.Shape([*x.shape[:2], 1, 1])
        if not keep:
            pooled = insert(node, "Flatten", [pooled], f"{node.name}/flatten", {"axis": 1})
            pooled.shape = ir.Shape(x.shape[:2])
        replace(node, pooled)
        changed += 1
    return changed


def fold_pads(model: ir.Model) -> int:
    """Zeros around the height and width of a convolution's input are `pads` of the convolution."""
    changed = 0
    for node in list(model.graph):
        x = node.inputs[0] if node.op_type == "Conv" else None
        pad = x.producer() if x is not None else None
        amounts = None
        if pad is not None and pad.op_type == "Pad":
            amounts = _zeros_around(pad)
        auto = attribute_of(node, "auto_pad", "NOTSET")
        if pad is None or amounts is None or auto != "NOTSET":
            continue
        if "pads" in node.attributes:
            old = list(node.attributes["pads"].as_ints())
        else:
            old = [0] * len(amounts)
        node.attributes["pads"] = ir.AttrInt64s("pads", [a + b for a, b in zip(old, amounts)])
        node.replace_input_with(0, pad.inputs[0])
        changed += 1
    return changed


def _zeros_around(pad: ir.Node) -> list[int] | None:
    """Zeros around, in the order of `pads` of a convolution: the beginnings of all axes, then the ends."""
    amounts = array_of(pad.inputs[1])
    value = array_of(pad.inputs[2]) if len(pad.inputs) > 2 else None
    has_value = len(pad.inputs) > 2 and pad.inputs[2] is not None
    if _mode(pad) != "constant" or amounts is None or (has_value and (value is None or value.any())):
        return None
    if any(x is not None for x in pad.inputs[3:]):
        return None  # for some axes only
    begins, ends = amounts.reshape(2, -1).tolist()
    if any(begins[:2] + ends[:2]) or min(begins + ends) < 0:
        return None
    return [*begins[2:], *ends[2:]]


def gelu_order(model: ir.Model) -> int:
    """x * (0.5 * (1 + erf)) -> (x * (1 + erf)) * 0.5, which onnxruntime knows as Gelu; halving is exact."""
    changed = 0
    for node in list(model.graph):
        if node.op_type != "Mul" or len(node.inputs) != 2:
            continue
        for x, halved in (node.inputs, node.inputs[::-1]):
            inner = halved.producer() if halved is not None else None
            if inner is None or inner.op_type != "Mul" or len(readers(inner.outputs[0])) != 1:
                continue
            half, rest = inner.inputs if array_of(inner.inputs[0]) is not None else inner.inputs[::-1]
            value = array_of(half)
            made = rest.producer() if rest is not None else None
            if (
                value is None
                or value.size != 1
                or float(value) != 0.5
                or made is None
                or made.op_type != "Add"
            ):
                continue
            product = insert(node, "Mul", [x, rest], f"{node.name}/product")
            product.shape = node.outputs[0].shape
            replace(node, insert(node, "Mul", [product, half], f"{node.name}/half"))
            changed += 1
            break
    return changed


def hoist(model: ir.Model, marks: Marks) -> int:
    """Repeat a per-tensor quantizer in front of the moves before it: quantize(move(x)) = move(quantize(x))."""
    added = 0
    for node in reversed(marks_in(model)):
        mark = marks.get(name_of(node))
        if mark is not None and not mark.is_weight and mark.qparams.scale.numel() == 1:
            added += _hoist_one(node, marks)
    return added


def _hoist_one(node: ir.Node, marks: Marks) -> int:
    source = node.inputs[0]
    mover = source.producer() if source is not None else None
    if mover is None or not _is_mover(mover) or not _only_same(source, node, marks):
        return 0
    if mover.op_type == "MaxPool" and _is_float_conv(mover.inputs[0]):
        return 0  # the pool stays in the blocked layout of float convolutions, and fewer values are rounded
    if len(mover.outputs) > 1 and not all(
        _only_same(out, node, marks) for out in mover.outputs if readers(out)
    ):
        return 0  # Split: another grid, or none, is behind the other pieces
    added = 0
    if mover.op_type == "Concat":
        inputs = mover.inputs
    else:
        inputs = mover.inputs[:1]
    for i, x in enumerate(inputs):
        if x is None or array_of(x) is not None or is_mark(x.producer()):
            continue
        copy = ir.node(OP, [x], attributes={KEY: name_of(node)}, domain=DOMAIN, name=f"{node.name}/before{i}")
        copy.outputs[0].shape = x.shape
        copy.outputs[0].type = x.type
        copy.metadata_props["copy"] = "1"
        assert mover.graph is not None
        mover.graph.insert_before(mover, [copy])
        mover.replace_input_with(i, copy.outputs[0])
        added += 1 + _hoist_one(copy, marks)
    for user in (user for out in mover.outputs for user in readers(out)):
        if any(x is not None and is_mark(x.producer()) for x in inputs):
            user.metadata_props["hoisted"] = "1"
    return added


def _is_float_conv(value: ir.Value | None) -> bool:
    """The output of a convolution with a float weight, as it is or clipped?"""
    made = None if value is None else value.producer()
    while made is not None and made.op_type in ("Relu", "Clip"):
        source = made.inputs[0]
        made = None if source is None else source.producer()
    if made is None or made.op_type != "Conv":
        return False
    return array_of(made.inputs[1]) is not None


def _is_mover(node: ir.Node) -> bool:
    if node.op_type == "Resize":
        return bool(attribute_of(node, "mode", "") == "nearest")
    if node.op_type == "Pad":
        return _pads_on_grid(node)
    return node.op_type in MOVERS and not node.domain


def _pads_on_grid(pad: ir.Node) -> bool:
    """Zeros, or copies of values of the input?"""
    value = pad.inputs[2] if len(pad.inputs) > 2 else None
    constant = array_of(value)
    is_zero = value is None or (constant is not None and not constant.any())
    return _mode(pad) in ("reflect", "edge", "wrap") or (_mode(pad) == "constant" and is_zero)


def _mode(pad: ir.Node) -> str:
    return str(attribute_of(pad, "mode", "constant"))


def _only_same(value: ir.Value | None, node: ir.Node, marks: Marks) -> bool:
    """Does everything that reads the moved value round it to the grid of this quantizer?"""
    assert value is not None
    grid = _grid(marks[name_of(node)])
    same = all(
        is_mark(u) and (name_of(u) == name_of(node) or _rounds_to(u, grid, marks)) for u in readers(value)
    )
    return same and not value.is_graph_output()


def _rounds_to(user: ir.Node, grid: Any, marks: Marks) -> bool:
    mark = marks.get(name_of(user))
    return (
        mark is not None and not mark.is_weight and "clip" not in user.metadata_props and _grid(mark) == grid
    )


def shapes_of_codes(model: ir.Model) -> int:
    """A Shape of a value that is quantized reads the codes, which have the same shape.

    onnxruntime computes an op in integers only if nothing but a QuantizeLinear reads its float output.
    """
    changed = 0
    for node in list(model.graph):
        value = node.inputs[0] if node.op_type == "Shape" else None
        quantize = []
        if value:
            quantize = [user for user in readers(value) if user.op_type == "QuantizeLinear"]
        if quantize:
            node.replace_input_with(0, quantize[0].outputs[0])
            changed += 1
    if changed:
        TopologicalSortPass()(model)  # the Shape may stand in front of the QuantizeLinear
    return changed


def pads_of_codes(model: ir.Model, lowered: Lowered) -> int:
    """A Pad between two equal quantizers pads the codes; instead of zeros it adds zero points."""
    changed = 0
    for node in list(model.graph):
        before, after = _around(node) if node.op_type == "Pad" else (None, None)
        if before is None or after is None or _numbers(before) != _numbers(after):
            continue
        mode = _mode(node)
        values = [before.inputs[0], node.inputs[1], *([before.inputs[2]] if mode == "constant" else [])]
        padded = insert(node, "Pad", values, f"{node.name}/codes", {"mode": mode})
        padded.shape = node.outputs[0].shape
        for site in lowered.sites:
            if site.before == node.outputs[0].name:  # nothing is rounded here any more
                site.before = site.after
                site.hoisted = True
        replace(after, padded)
        changed += 1
    return changed


def _around(pad: ir.Node) -> tuple[ir.Node | None, ir.Node | None]:
    """The DequantizeLinear in front, and the QuantizeLinear that alone reads the result."""
    source = pad.inputs[0]
    before = source.producer() if source is not None else None
    users = readers(pad.outputs[0])
    is_between = (
        before is not None and before.op_type == "DequantizeLinear" and "axis" not in before.attributes
    )
    is_alone = [user.op_type for user in users] == ["QuantizeLinear"] and not pad.outputs[0].is_graph_output()
    if is_between and is_alone:
        return (before, users[0])
    return (None, None)


def _numbers(node: ir.Node) -> list[Any]:
    """Scale and zero point of a node of QDQ."""
    found = [array_of(value) for value in node.inputs[1:3]]
    result: list[Any] = []
    for a in found:
        result.append(None if a is None else (a.dtype, a.tolist()))
    return result


def keep_apart(model: ir.Model) -> int:
    """Stop fusions that would change numbers, or that onnxruntime 1.31 makes and then refuses to run, with a Sum of
    one value:
    - behind a weight below 8 bits: the layer runs in float, but onnxruntime would still round its bias, to the
      coarse grid of input times weight, and make a QLinearConv of 2-bit weights;
    - in front of a layer with a float weight between quantizers: onnxruntime would round its weight itself;
    - around an activation with a scale per channel: integer kernels take one scale per activation;
    - behind a MaxPool of float values: onnxruntime would round in front of it, and pool codes with channels in front,
      which takes 20 times as long;
    - in front of SiLU and GELU, which read x twice: onnxruntime dequantizes it once for each reader, and then does
      not see that they belong together (with the Sum, a convolution and a GELU take 0.7 of the time).
    """
    changed = 0
    for node in list(model.graph):
        if node.op_type in ("Conv", "ConvTranspose", "Gemm", "MatMul"):
            x, w = (stored_type(value) for value in node.inputs[:2])
            apart = x is not None or node.op_type.startswith("Conv")  # a float input has MatMulNBits,
            apart = apart or w in (ir.DataType.INT2, ir.DataType.UINT2)  # which is wrong for 2 bits in 1.31
            if apart and w is not None and w not in (ir.DataType.INT8, ir.DataType.UINT8):
                node.replace_input_with(1, insert(node, "Sum", [node.inputs[1]], f"{node.name}/apart"))
                changed += 1
            elif x is not None and w is None and array_of(node.inputs[1]) is not None:
                node.replace_input_with(0, insert(node, "Sum", [node.inputs[0]], f"{node.name}/apart"))
                changed += 1
        elif node.op_type == "QuantizeLinear" and ("axis" in node.attributes or _is_float_pool(node)):
            node.replace_input_with(0, insert(node, "Sum", [node.inputs[0]], f"{node.name}/apart"))
            changed += 1
        elif _is_activation(node) and ("axis" in node.attributes or _in_front_of_gate(node)):
            _behind(node)
            changed += 1
    return changed


def _is_float_pool(node: ir.Node) -> bool:
    """Does the quantizer read a MaxPool behind a float convolution?"""
    pool = None
    if node.inputs[0] is not None:
        pool = node.inputs[0].producer()
    return pool is not None and pool.op_type == "MaxPool" and _is_float_conv(pool.inputs[0])


def _in_front_of_gate(node: ir.Node) -> bool:
    """x * sigmoid(x), or x * (1 + erf(x / sqrt(2)))?"""
    users = {user.op_type: user for user in readers(node.outputs[0])}
    if len(users) != 2 or "Mul" not in users:
        return False
    if "Sigmoid" in users:
        return readers(users["Sigmoid"].outputs[0]) == [users["Mul"]]
    return "Div" in users and [user.op_type for user in readers(users["Div"].outputs[0])] == ["Erf"]


def _is_activation(node: ir.Node) -> bool:
    kind = node.metadata_props.get("sparsebit.kind")
    return node.op_type == "DequantizeLinear" and kind == "activation"


def _behind(node: ir.Node) -> None:
    """A Sum of one value between a node and all of its readers."""
    out = node.outputs[0]
    apart = ir.node("Sum", [node.outputs[0]], name=f"{node.name}/apart")
    apart.outputs[0].name = f"{node.name}/apart/out"
    apart.outputs[0].type = out.type
    apart.outputs[0].shape = out.shape
    uses = list(out.uses())
    assert node.graph is not None
    node.graph.insert_after(node, [apart])
    for use in uses:
        if use.node is not apart:
            use.node.replace_input_with(use.idx, apart.outputs[0])


def stored_type(value: ir.Value | None) -> Any:
    """The integer type behind a dequantized value."""
    made = made_by(value)
    if made is None or made.op_type != "DequantizeLinear" or made.inputs[0] is None:
        return None
    return made.inputs[0].dtype
