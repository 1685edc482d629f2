"""Sizes that a graph has as literals (`view(b, -1, 64)`, `split(32)`, `x[:, :16]`, `pad`): they follow the channels.

An argument is replaced only where what it says is no longer true, so a batch size stays as it was written.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, fx, nn

if TYPE_CHECKING:
    from sparsebit.sparse.surgery import Cut

Rewrite = Callable[["Cut", fx.Node, fx.Node, Any], None]


def rewrite(cut: Cut, node: fx.Node, old: fx.Node, env: Any) -> None:
    """Bring the literals of `node` up to date; `old` is the same node before the cut."""
    name = node.target if node.op == "call_method" else getattr(node.target, "__name__", "")
    if node.op == "call_module":
        module = env.module.get_submodule(str(node.target))
        if isinstance(module, nn.Unflatten):
            out = cut.shape(cut.walk.of[old])
            start = module.dim % (len(out) - len(module.unflattened_size) + 1)
            module.unflattened_size = tuple(out[start : start + len(module.unflattened_size)])
        return
    if cut.walk.rules.get(old, "").endswith(".meet"):
        _numbers(cut, node, old, env)
    known = REWRITES.get(str(name))
    if known is not None and isinstance(_first(cut, old), Tensor):
        known(cut, node, old, env)


def _first(cut: Cut, old: fx.Node) -> Any:
    source = old.args[0] if old.args else old.kwargs.get("input", old.kwargs.get("query"))
    return cut.walk.of[source] if isinstance(source, fx.Node) else None


def _numbers(cut: Cut, node: fx.Node, old: fx.Node, env: Any) -> None:
    """`x * (C // heads) ** -0.5`: a factor that was computed from sizes stays what it was."""
    before = dict(zip(node.all_input_nodes, old.all_input_nodes))

    def as_before(n: fx.Node) -> Any:
        value = cut.walk.values[before[n]]
        return value if isinstance(value, (int, float)) and env.env[n] != value else n

    node.args, node.kwargs = fx.map_arg(node.args, as_before), fx.map_arg(node.kwargs, as_before)


def _sizes(cut: Cut, node: fx.Node, old: fx.Node, env: Any) -> None:
    """view, reshape, expand, ...: the sizes come one by one, or in a tuple."""
    wanted = cut.shape(cut.walk.of[old])
    rest: list[Any] = list(node.args[1:]) or [node.kwargs.get("shape", node.kwargs.get("size"))]
    packed = len(rest) == 1 and not isinstance(rest[0], int) and not _is_number(rest[0], env)
    given: Any = rest[0] if packed else rest
    given = [given] if given is None else given
    if isinstance(given, fx.Node):
        if list(env.env[given]) != wanted:
            node.args, node.kwargs = (node.args[0], _keep_batch(cut, old, wanted)), {}
        return
    said = [env.env[v] if isinstance(v, fx.Node) else v for v in given]
    new = [v if s in (-1, w) else w for v, s, w in zip(given, said, wanted)]
    if len(given) == len(wanted) and new != list(given):
        node.args = (node.args[0], tuple(new)) if packed else (node.args[0], *new)
        node.kwargs = {}


def _is_number(value: Any, env: Any) -> bool:
    return isinstance(value, fx.Node) and isinstance(env.env[value], int)


def _keep_batch(cut: Cut, old: fx.Node, wanted: list[int]) -> tuple[int, ...]:
    return (-1, *wanted[1:]) if cut.walk.of[old].shape[0] == wanted[0] else tuple(wanted)


def _argument(node: fx.Node, place: int, name: str, default: Any = None) -> Any:
    return node.args[place] if len(node.args) > place else node.kwargs.get(name, default)


def _parts(cut: Cut, node: fx.Node, old: fx.Node, env: Any) -> None:
    """split and chunk: how long each part is."""
    dim = _argument(old, 2, "dim", 0)
    parts = [cut.shape(labels)[dim] for labels in cut.walk.of[old]]
    if (
        not cut.axes(_first(cut, old))
        .get(dim % _first(cut, old).dim(), torch.ones(1, dtype=torch.bool))
        .all()
    ):
        node.target = "split" if node.op == "call_method" else torch.split
        node.args, node.kwargs = (node.args[0], parts, dim), {}


def _slices(cut: Cut, node: fx.Node, old: fx.Node, env: Any) -> None:
    """x[:, a:b] on an axis that lost channels: a and b count what is kept before them."""
    labels, index = _first(cut, old), node.args[1]
    lost = cut.axes(labels)
    if not lost:
        return
    axis, new = 0, []
    parts = list(index) if isinstance(index, tuple) else [index]
    for k, part in enumerate(parts):
        if part is Ellipsis:
            axis = labels.dim() - sum(p is not None for p in parts[k + 1 :])
        elif isinstance(part, slice) and axis in lost and not _whole(part):
            plain = slice(
                *(env.env[v] if isinstance(v, fx.Node) else v for v in (part.start, part.stop, part.step))
            )
            start, stop, _ = plain.indices(labels.shape[axis])
            part = slice(int(lost[axis][:start].sum()), int(lost[axis][:stop].sum()))
        new.append(part)
        axis += part is not None and part is not Ellipsis
    node.args = (node.args[0], tuple(new) if isinstance(index, tuple) else new[0])


def _whole(part: slice) -> bool:
    return part.start is None and part.stop is None


def _narrow(cut: Cut, node: fx.Node, old: fx.Node, env: Any) -> None:
    labels, dim = _first(cut, old), _argument(old, 1, "dim")
    lost = cut.axes(labels).get(dim % labels.dim())
    if lost is not None:
        start, length = (_known(cut, _argument(old, *at)) for at in ((2, "start"), (3, "length")))
        kept = int(lost[start : start + length].sum())
        node.args, node.kwargs = (node.args[0], dim, int(lost[:start].sum()), kept), {}


def _known(cut: Cut, value: Any) -> Any:
    """An argument as it was before the cut."""
    return fx.map_arg(value, lambda n: cut.walk.values[n])


def _pads(cut: Cut, node: fx.Node, old: fx.Node, env: Any) -> None:
    given, out = list(_argument(node, 1, "pad")), cut.walk.of[old]
    before, lost = list(_known(cut, _argument(old, 1, "pad"))), cut.axes(out)
    for i in range(0, len(given), 2):
        axis = out.dim() - 1 - i // 2
        if axis in lost:
            kept, n = lost[axis], out.shape[axis]
            given[i], given[i + 1] = int(kept[: before[i]].sum()), int(kept[n - before[i + 1] :].sum())
    if len(node.args) > 1:
        node.args = (node.args[0], tuple(given), *node.args[2:])
    else:
        node.kwargs = {**node.kwargs, "pad": tuple(given)}


def _unflatten(cut: Cut, node: fx.Node, old: fx.Node, env: Any) -> None:
    out, sizes = cut.shape(cut.walk.of[old]), list(_argument(node, 2, "sizes"))
    dim = _argument(old, 1, "dim") % _first(cut, old).dim()
    wanted = out[dim : dim + len(sizes)]
    said = [env.env[v] if isinstance(v, fx.Node) else v for v in sizes]
    new = [v if s in (-1, w) else w for v, s, w in zip(sizes, said, wanted)]
    if new != sizes:
        node.args, node.kwargs = (node.args[0], dim, tuple(new)), {}


def _scale(cut: Cut, node: fx.Node, old: fx.Node, env: Any) -> None:
    """Attention that lost dimensions of a head divides by what it divided by before."""
    labels = _first(cut, old)
    if labels.dim() - 1 in cut.axes(labels) and node.kwargs.get("scale") is None and len(node.args) < 7:
        node.kwargs = {**node.kwargs, "scale": labels.shape[-1] ** -0.5}


REWRITES: dict[str, Rewrite] = {
    **dict.fromkeys(("view", "reshape", "expand", "broadcast_to"), _sizes),
    **dict.fromkeys(("split", "chunk", "tensor_split"), _parts),
    "getitem": _slices,
    "narrow": _narrow,
    "pad": _pads,
    "unflatten": _unflatten,
    "scaled_dot_product_attention": _scale,
}
