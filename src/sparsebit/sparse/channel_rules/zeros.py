"""What is zero, in the masked model, wherever a channel goes: only then may a sum run over channels that are cut."""

from __future__ import annotations

import operator
from typing import TYPE_CHECKING, Any

from torch import Tensor, fx, nn
from torch.nn.modules.batchnorm import _NormBase

from sparsebit.graph.ops import op_of
from sparsebit.sparse.channel_rules.moves import MOVES, MOVING_MODULES, spelled

if TYPE_CHECKING:
    from sparsebit.sparse.channels import Walk

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


def stays_zero(walk: Walk, node: fx.Node) -> bool:
    if node.op == "get_attr":
        return True  # parameters and buffers are masked themselves
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
        return bool(same) and same[0] and node.args[0] is sources[0]
    return op in SUMS and len(same) == 2 and all(same)


def _is_made(walk: Walk, node: fx.Node) -> bool:
    """Weight and bias are masked where they make a channel."""
    module: Any = walk.module(node)
    axis = isinstance(module, (nn.modules.conv._ConvTransposeNd, nn.Embedding, nn.EmbeddingBag))
    return module.weight is not None and walk.known(f"{node.target}.weight", int(axis)) is not None


def _has_channels_of(walk: Walk, source: fx.Node, node: fx.Node) -> bool:
    """Is it as long as the result wherever that has channels? What it is spread over besides is as zero as it is."""
    labels, shape = walk.of[node], _shape(walk, source)
    if not isinstance(labels, Tensor) or shape == "parts":
        return False
    aligned = (*[1] * (labels.dim() - len(shape)), *shape)
    return all(aligned[d] == labels.shape[d] for d in walk.labels.varies(labels))


def _shape(walk: Walk, node: fx.Node) -> Any:
    value = walk.values.get(node)
    if isinstance(value, (list, tuple)) and value and isinstance(value[0], Tensor):
        return "parts"
    return value.shape if isinstance(value, Tensor) else None
