"""Which values of the masked model are zero wherever a channel is removed. Only these may be summed over
channels."""

from __future__ import annotations

import operator
from typing import TYPE_CHECKING, Any

from torch import Tensor, fx, nn
from torch.nn.modules.batchnorm import _NormBase

from sparsebit.graph.ops import argument, op_of
from sparsebit.sparse.labels.rules.moves import MOVES, MOVING_MODULES, spelled

if TYPE_CHECKING:
    from sparsebit.sparse.labels.walk import Walk

LAYERS = (nn.modules.conv._ConvNd, nn.Linear, nn.Embedding, nn.EmbeddingBag)
MAKERS = (*LAYERS, _NormBase, nn.LayerNorm, nn.RMSNorm, nn.GroupNorm)
KEEPERS = {  # f(0) = 0
    *MOVES,
    *MOVING_MODULES,
    *spelled(
        "relu relu_ relu6 leaky_relu elu selu celu gelu silu mish hardswish hardtanh tanh softsign dropout abs neg "
        "cat concat stack sqrt square sin expm1 log1p erf sign float half double bfloat16 to type_as unbind select"
    ),
    *(nn.ReLU, nn.ReLU6, nn.LeakyReLU, nn.ELU, nn.GELU, nn.SiLU, nn.Mish, nn.Hardswish, nn.Tanh, nn.Dropout),
    *(operator.getitem, operator.neg, nn.PReLU),
}
PRODUCTS = {*spelled("mul mul_ multiply"), operator.mul, operator.imul}
QUOTIENTS = {*spelled("div div_ divide true_divide"), operator.truediv, operator.itruediv}
SUMS = {*spelled("add add_ sub sub_"), operator.add, operator.sub, operator.iadd, operator.isub}
DIVISIONS = {*QUOTIENTS, *spelled("fmod remainder floor_divide"), operator.mod, operator.floordiv}
POWERS = {*spelled("pow"), operator.pow}
CARRIERS = {*SUMS, *PRODUCTS, *MOVES, *MOVING_MODULES}
POLES = {*spelled("reciprocal rsqrt sqrt hypot log log2 log10 addcdiv")}  # 1/0, log(0), the slope of a root


def stays_zero(walk: Walk, node: fx.Node) -> bool:
    if node.op == "get_attr":
        return str(node.target) not in walk.divisors  # other parameters are masked
    if node.op in ("placeholder", "output"):
        return False
    op = op_of(node, walk.gm)
    if node.op == "call_module" and isinstance(walk.module(node), MAKERS):
        return _is_made(walk, node)
    sources = [n for n in node.all_input_nodes if _shape(walk, n) is not None]
    if op in KEEPERS:
        return bool(sources) and all(n in walk.zero for n in sources)
    same = [n in walk.zero and _has_channels_of(walk, n, node) for n in sources]
    if op in PRODUCTS:
        return any(same)
    if op in QUOTIENTS:
        return bool(same) and same[0] and argument(node, 0, "input") is sources[0]
    return op in SUMS and len(same) == 2 and all(same)


def divisors(gm: fx.GraphModule) -> set[str]:
    """Parameters and buffers that the graph reads without a layer and divides by, or takes the root or
    logarithm of.

    They are not masked. A zero would give NaN, or a NaN gradient, and NaN times the zeros of a masked layer
    is NaN.
    """
    layers = {str(n.target) for n in gm.graph.nodes if n.op == "call_module"}
    alone: set[fx.Node] = set()  # computed only from parameters and buffers
    # for each value, the parameters that make it zero if they are zero; also inside sums and products
    holds: dict[fx.Node, set[str]] = {}
    found: set[str] = set()
    for node in gm.graph.nodes:
        sources = node.all_input_nodes
        if node.op == "get_attr":
            path = str(node.target)
            if path.rpartition(".")[0] in layers:
                holds[node] = set()
            else:
                holds[node] = {path}
            alone.add(node)
        elif node.op.startswith("call"):
            op = op_of(node, gm)
            found |= set[str]().union(*(holds.get(n, ()) for n in _poles(node, op)))
            if sources and alone.issuperset(sources):
                alone.add(node)
            if node in alone or op in CARRIERS:
                holds[node] = set[str]().union(*(holds.get(n, ()) for n in sources))
    return found


def _poles(node: fx.Node, op: Any) -> list[Any]:
    """The arguments of an op that must not be zero."""
    if op in POWERS:
        power = argument(node, 1, "exponent")
        if isinstance(power, (int, float)) and power >= 1:
            return []
        return node.all_input_nodes
    if op in DIVISIONS:
        return [argument(node, 1, "other")]
    return node.all_input_nodes if op in POLES else []


def _is_made(walk: Walk, node: fx.Node) -> bool:
    """Weight and bias are masked where they make a channel."""
    module: Any = walk.module(node)
    axis = isinstance(module, (nn.modules.conv._ConvTransposeNd, nn.Embedding, nn.EmbeddingBag))
    return module.weight is not None and walk.known(f"{node.target}.weight", int(axis)) is not None


def _has_channels_of(walk: Walk, source: fx.Node, node: fx.Node) -> bool:
    """Is it as long as the result on every axis with channels? On other axes the value repeats, and a zero
    stays zero."""
    labels = walk.of[node]
    shape = _shape(walk, source)
    if not isinstance(labels, Tensor) or shape == "parts":
        return False
    aligned = (*[1] * (labels.dim() - len(shape)), *shape)
    return all(aligned[d] == labels.shape[d] for d in walk.labels.varies(labels))


def _shape(walk: Walk, node: fx.Node) -> Any:
    value = walk.values.get(node)
    if isinstance(value, (list, tuple)) and value and isinstance(value[0], Tensor):
        return "parts"
    return value.shape if isinstance(value, Tensor) else None
