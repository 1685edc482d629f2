"""From an aten op, as torch.export records it, back to the torch function or method that people write.

One rule covers most ops: torch.nn.functional.<name> if its parameters have the names of the op's, else
torch.<name>, else the Tensor method <name>. The rows are for ops that differ from all of these. Other ops
stay aten ops.
"""

from __future__ import annotations

import inspect
import operator
import sys
from collections.abc import Callable
from types import BuiltinFunctionType
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import fx

from sparsebit.graph.export.experts import grouped_mm


class Call(NamedTuple):
    """A call in the graph. With `item`, its result is the only used entry of the tuple that the op returns."""

    target: Any  # a function, or the name of a method
    args: tuple[Any, ...]
    kwargs: dict[str, Any] = {}
    item: int | None = None


Values = dict[str, Any]  # the given arguments, by the names of the op's schema
# these have no meaning outside aten, or none at all
_DROPPED = {"cudnn_enable", "cudnn_enabled", "pin_memory", "implicit"}


def translate(node: fx.Node) -> Call | None:
    """The call that does the same as the aten op of `node`; None if there is none."""
    op = node.target
    if not isinstance(op, torch._ops.OpOverload):
        return None
    name = op._schema.name.removeprefix("aten::")
    values = dict(zip((a.name for a in op._schema.arguments), node.args))
    values.update(node.kwargs)
    if name in ROWS:
        call = ROWS[name](values)
        if call is not None:
            return call
    if op.namespace != "aten":
        return None
    if name.endswith("_") and not name.endswith("__"):
        return _in_place(name, node, values)
    return _by_name(name, node, values)


def _by_name(name: str, node: fx.Node, values: Values) -> Call | None:
    wanted = getattr(F, name, None)
    if isinstance(wanted, BuiltinFunctionType):  # generated from the schema
        return Call(wanted, node.args, _kept(node.kwargs))
    call = None
    if inspect.isfunction(wanted):
        call = _by_parameters(wanted, values)
    if call is not None:
        return call
    for prefix in ("linalg", "special", "fft"):
        if name.startswith(f"{prefix}_"):
            found = getattr(getattr(torch, prefix), name.removeprefix(f"{prefix}_"), None)
            if found is None:
                return None
            return Call(found, node.args, node.kwargs)
    if isinstance(getattr(torch, name, None), BuiltinFunctionType):
        return Call(getattr(torch, name), node.args, dict(node.kwargs))
    if callable(getattr(torch.Tensor, name, None)) and node.args:
        return Call(name, node.args, _kept(node.kwargs))
    return None


def _in_place(name: str, node: fx.Node, values: Values) -> Call | None:
    """`relu_` is a method; `silu_` is only F.silu(x, inplace=True)."""
    if callable(getattr(torch.Tensor, name, None)):
        return Call(name, node.args, _kept(node.kwargs))
    function = getattr(F, name.removesuffix("_"), None)
    call = None
    if inspect.isfunction(function):
        call = _by_parameters(function, values)
    if call is None or "inplace" not in inspect.signature(call.target).parameters:
        return None
    return call._replace(kwargs={**call.kwargs, "inplace": True})


def _by_parameters(function: Callable[..., Any], values: Values) -> Call | None:
    """A call of a Python function with the op's arguments by name, if it has them all."""
    (_, first), *rest = _kept(values).items()
    first_name, *names = inspect.signature(function).parameters
    if first_name in ("args", "kwargs") or "reduction" in values:  # a string in F's losses, a number here
        return None
    named = {{"train": "training"}.get(key, key): value for key, value in rest}
    if not set(named) <= set(names):
        return None
    args = [first]
    for name in names:  # by position as long as the order is the same
        if next(iter(named), None) != name:
            break
        args.append(named.pop(name))
    return Call(function, tuple(args), named)


def _kept(values: Any) -> Values:
    return {k: v for k, v in values.items() if k not in _DROPPED}


# -- rows: name of the op -> a function from its arguments to the call, or None -------------------------------
def _method(name: str) -> Callable[[Values], Call]:
    return lambda v: Call(name, tuple(v.values()))


def _function(function: Any, **options: Any) -> Callable[[Values], Call]:
    """A call of a function with the same arguments in the same order."""
    return lambda v: Call(function, tuple(_kept(v).values()), options)


def _slice(v: Values) -> Call | None:
    """`x[:, a:b]`: an axis counted from the end would need the rank."""
    x = v["self"]
    dim = v.get("dim", 0)
    if dim < 0:
        dim += x.meta["val"].dim() if "val" in x.meta else -sys.maxsize
    if dim < 0:
        return None
    start = v.get("start")
    end = v.get("end")
    step = v.get("step", 1)
    if isinstance(end, int) and end >= sys.maxsize:
        end = None
    part = slice(None if start == 0 else start, end, None if step == 1 else step)
    return Call(operator.getitem, (x, (*[slice(None)] * dim, part)))


def _index(v: Values) -> Call:
    return Call(operator.getitem, (v["self"], tuple(slice(None) if i is None else i for i in v["indices"])))


def _index_put(v: Values) -> Call | None:
    if None in v["indices"]:
        return None
    return Call("index_put_", tuple(v.values()))


def _rsub(v: Values) -> Call | None:
    if v.get("alpha", 1) != 1:
        return None
    return Call(operator.sub, (v["other"], v["self"]))


def _to(v: Values) -> Call:
    """Leave out arguments without effect: a layout, or the device of the tensor (it may move with the model)."""
    kept = {k: x for k, x in v.items() if k not in ("layout", "pin_memory") and x is not None}
    value = kept["self"].meta.get("val")
    if isinstance(value, torch.Tensor) and kept.get("device") == value.device:
        del kept["device"]
    return Call("to", (kept.pop("self"),), kept)


def _hardtanh(v: Values) -> Call | None:
    """ReLU6 is recorded as hardtanh."""
    is_relu6 = v.get("min_val", -1.0) == 0 and v.get("max_val", 1.0) == 6
    return Call(F.relu6, (v["self"],)) if is_relu6 else None


def _hardtanh_(v: Values) -> Call | None:
    call = _hardtanh(v)
    return call and call._replace(kwargs={"inplace": True})


def _pool(name: str, item: int | None = None) -> Callable[[Values], Call]:
    """An empty stride means the kernel size."""
    names = ("kernel_size", "stride", "padding", "dilation", "ceil_mode")
    given = lambda v: {k: v[k] for k in names if v.get(k, []) != []}
    return lambda v: Call(getattr(F, name), (v["self"],), given(v), item)


def _first_of(name: str) -> Callable[[Values], Call]:
    """The op also returns the positions of the values."""
    return lambda v: Call(getattr(F, name), tuple(v.values()), item=0)


def _upsample(mode: str, **more: Any) -> Callable[[Values], Call | None]:
    def row(v: Values) -> Call | None:
        if "input" not in v:
            return None  # the overload that ONNX-like programs use
        options = {"size": v.get("output_size"), "scale_factor": v.get("scale_factors"), "mode": mode}
        options["align_corners"] = v.get("align_corners") or None
        return Call(F.interpolate, (v["input"],), {**options, **more})

    return row


def _grid_sample(v: Values) -> Call:
    mode = ("bilinear", "nearest", "bicubic")[v["interpolation_mode"]]
    padding = ("zeros", "border", "reflection")[v["padding_mode"]]
    options = {"mode": mode, "padding_mode": padding, "align_corners": v["align_corners"]}
    return Call(F.grid_sample, (v["input"], v["grid"]), options)


def _embedding(v: Values) -> Call:
    options: Values = {k: v[k] for k in ("scale_grad_by_freq", "sparse") if k in v}
    if v.get("padding_idx", -1) != -1:
        options["padding_idx"] = v["padding_idx"]
    return Call(F.embedding, (v["indices"], v["weight"]), options)


def _embedding_bag(v: Values) -> Call:
    given = ("offsets", "scale_grad_by_freq", "sparse", "per_sample_weights")
    options: Values = {k: v[k] for k in given if k in v}
    options["include_last_offset"] = v.get("include_last_offset", False)
    options["mode"] = ("sum", "mean", "max")[v.get("mode", 0)]
    if v.get("padding_idx", -1) != -1:
        options["padding_idx"] = v["padding_idx"]
    return Call(F.embedding_bag, (v["indices"], v["weight"]), options, item=0)


def _convolution(v: Values) -> Call | None:
    dims = len(v["stride"])
    if not 1 <= dims <= 3:
        return None
    names = ("stride", "padding", "dilation", "groups", *(["output_padding"] if v["transposed"] else []))
    function = getattr(F, f"conv_transpose{dims}d" if v["transposed"] else f"conv{dims}d")
    return Call(function, (v["input"], v["weight"], v["bias"]), {name: v[name] for name in names})


def _native_layer_norm(v: Values) -> Call:
    return Call(
        F.layer_norm, tuple(v[k] for k in ("input", "normalized_shape", "weight", "bias", "eps")), item=0
    )


def _native_group_norm(v: Values) -> Call:
    return Call(F.group_norm, (v["input"], v["group"], v["weight"], v["bias"], v["eps"]), item=0)


def _native_batch_norm(v: Values) -> Call:
    names = ("input", "running_mean", "running_var", "weight", "bias")
    return Call(
        F.batch_norm, tuple(v[k] for k in names), {"momentum": v["momentum"], "eps": v["eps"]}, item=0
    )


ROWS: dict[str, Callable[[Values], Call | None]] = {
    # sizes are Python numbers
    "sym_size": _method("size"),
    "sym_numel": _method("numel"),
    "sym_stride": _method("stride"),
    "sym_storage_offset": _method("storage_offset"),
    "_local_scalar_dense": _method("item"),
    # indexing and shapes
    "slice": _slice,
    "index": _index,
    "index_put_": _index_put,
    "numpy_T": lambda v: Call(getattr, (v["self"], "T")),
    "mT": lambda v: Call(torch.transpose, (v["self"], -2, -1)),
    "split": _function(torch.split),
    "split_with_sizes": _function(torch.split),
    "meshgrid": lambda v: Call(torch.meshgrid, tuple(v["tensors"]), {"indexing": v.get("indexing", "ij")}),
    "broadcast_tensors": lambda v: Call(torch.broadcast_tensors, tuple(v["tensors"])),
    "im2col": _function(F.unfold),
    "col2im": _function(F.fold),
    "to": _to,
    "_to_copy": _to,
    "lift_fresh_copy": _function(torch.clone),
    # operators
    "rsub": _rsub,
    "__and__": _function(operator.and_),
    "__or__": _function(operator.or_),
    "__xor__": _function(operator.xor),
    "einsum": lambda v: Call(torch.einsum, (v["equation"], *v["tensors"])),
    "tensordot": lambda v: Call(
        torch.tensordot, (v["self"], v["other"]), {"dims": (v["dims_self"], v["dims_other"])}
    ),
    # activations, pools, resizing
    "hardtanh": _hardtanh,
    "hardtanh_": _hardtanh_,
    "log_sigmoid": _function(F.logsigmoid),
    "_softmax": lambda v: Call(F.softmax, (v["self"], v["dim"])),
    "_log_softmax": lambda v: Call(F.log_softmax, (v["self"], v["dim"])),
    **{f"max_pool{d}d": _pool(f"max_pool{d}d") for d in (1, 2, 3)},
    **{f"max_pool{d}d_with_indices": _pool(f"max_pool{d}d", item=0) for d in (2, 3)},
    **{f"adaptive_max_pool{d}d": _first_of(f"adaptive_max_pool{d}d") for d in (1, 2, 3)},
    "_adaptive_avg_pool2d": _function(F.adaptive_avg_pool2d),
    "_adaptive_avg_pool3d": _function(F.adaptive_avg_pool3d),
    **{f"upsample_nearest{d}d": _upsample("nearest") for d in (1, 2, 3)},
    **{f"_upsample_nearest_exact{d}d": _upsample("nearest-exact") for d in (1, 2, 3)},
    "upsample_linear1d": _upsample("linear"),
    "upsample_bilinear2d": _upsample("bilinear"),
    "upsample_bicubic2d": _upsample("bicubic"),
    "upsample_trilinear3d": _upsample("trilinear"),
    "_upsample_bilinear2d_aa": _upsample("bilinear", antialias=True),
    "_upsample_bicubic2d_aa": _upsample("bicubic", antialias=True),
    "grid_sampler": _grid_sample,
    "grid_sampler_2d": _grid_sample,
    "affine_grid_generator": _function(F.affine_grid),
    # weights
    "embedding": _embedding,
    "embedding_bag": _embedding_bag,
    "convolution": _convolution,
    "transformers::grouped_mm_fallback": _function(grouped_mm),
    "native_layer_norm": _native_layer_norm,
    "native_group_norm": _native_group_norm,
    "_native_batch_norm_legit_no_training": _native_batch_norm,
}
