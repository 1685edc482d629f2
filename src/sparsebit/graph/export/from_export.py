"""The torch.export front-end: an exported program becomes a graph of ordinary torch calls over the same
parameters.

The graph is called like the model and returns the same structures. Nodes have the names of the modules that
made them. The rest of the library treats it like a graph from torch.fx.
"""

from __future__ import annotations

import copy
import inspect
import operator
import re
from collections import defaultdict
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.utils import _pytree as pytree

from sparsebit.graph.export.aten_table import translate
from sparsebit.graph.export.run_export import run_export
from sparsebit.graph.export.structures import (
    Build,
    InputCheck,
    PackOutputs,
    arguments_of,
    is_literal,
    is_plain,
    leaves_of,
)
from sparsebit.graph.trace.from_module import own_copy
from sparsebit.graph.trace.no_grad import bracket_no_grad

__all__ = ["from_exported", "is_exported", "trace_export"]

_NO_OPS = {"alias", "lift_fresh", "lift", "detach_"}  # their result is their input
_CHECKS = {"_assert_tensor_metadata", "_assert_scalar", "_assert_async", "sym_constrain_range"}
_CHECKS |= {"sym_constrain_range_for_size"}
_HAS_WEIGHTS = re.compile(r"linear|conv|addmm|embedding|_norm")


def is_exported(model: Any) -> bool:
    """Is this the result of torch.export: an ExportedProgram, or a GraphModule of aten ops?"""
    if isinstance(model, fx.GraphModule):
        return any(isinstance(node.target, torch._ops.OpOverload) for node in model.graph.nodes)
    return isinstance(model, torch.export.ExportedProgram)


def from_exported(program: torch.export.ExportedProgram | fx.GraphModule) -> fx.GraphModule:
    """The graph of `program` in ordinary torch calls, over copies of its parameters.

    It takes the arguments that the program was exported with, by position or by name. It refuses inputs that
    do not fit the exported graph: another size of a fixed axis, or another flag.
    """
    if isinstance(program, fx.GraphModule):
        exported = program
    else:
        exported = program.module()
    assert isinstance(exported, fx.GraphModule)
    info = getattr(exported.graph._codegen, "pytree_info", None)
    spec = None if info is None else info.out_spec
    if spec is None:
        build = None
    else:
        build = lambda leaves: pytree.tree_unflatten(leaves, spec)
    return _Conversion(exported, None, build, clone=True).result("Exported")


def trace_export(
    model: nn.Module, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
) -> fx.GraphModule:
    """`model` through torch.export: `from_exported`, with the signature of the model's forward.

    args, kwargs  an example call. Sizes that the model does not fix may differ later, but not the height and the
                  width of images.
    """
    model = own_copy(model).eval()
    signature = inspect.signature(model.forward)
    exported, build = run_export(model, args, dict(kwargs or {}))
    return _Conversion(exported, signature, build, clone=False).result(type(model).__name__)


class _Conversion:
    """Converts one exported module into one fx.GraphModule."""

    def __init__(
        self, exported: fx.GraphModule, signature: inspect.Signature | None, build: Build | None, clone: bool
    ):
        self.exported = exported
        self.build = build
        self.clone = clone
        self.signature, self.arguments = arguments_of(exported, signature)
        self.root = nn.Module()
        self.graph = fx.Graph()
        self.copies: dict[int, Tensor] = {}  # by the id of the original: tied weights stay tied
        self.blocks: dict[nn.Module, str] = {exported: ""}  # prefixes for the attributes of blocks of code
        self.alone: set[fx.Node] = set()  # ops that are the whole of a torch.nn module
        self.device: tuple[torch.device, fx.Node] | None = None  # of the inputs, and an input on it

    def result(self, name: str) -> fx.GraphModule:
        env = self._inputs()
        self.graph.output(self._outputs(self._body(self.exported, env)))
        bracket_no_grad(self.graph)
        gm = fx.GraphModule(self.root, self.graph, name).eval()
        gm.graph.lint()
        gm.meta["by_export"] = True
        for node in gm.graph.nodes:
            node.meta.setdefault("path", node.name if node.op == "call_function" else str(node.target))
        return gm

    # -- inputs and outputs --------------------------------------------------------------------------
    def _inputs(self) -> dict[fx.Node, Any]:
        """Placeholders as in the user's forward. The leaves of their values replace the exported
        placeholders."""
        values = {name: self._placeholder(p) for name, p in self.signature.parameters.items()}
        self.root.check_inputs = InputCheck(self.arguments, self.exported)
        self.graph.create_node("call_module", "check_inputs", kwargs={**values}, name="check_inputs")
        env: dict[fx.Node, Any] = {}
        for argument, steps, leaf in leaves_of(self.arguments):
            if isinstance(leaf, fx.Node):
                value = values[argument]
                for step, key in steps:
                    value = self.graph.call_function(step, (value, key))
                if "val" in leaf.meta:
                    value.meta["val"] = leaf.meta["val"]
                env[leaf] = value
        tensors = [v for v in env.values() if isinstance(v.meta.get("val"), Tensor)]
        if tensors:
            device = self.graph.create_node("call_function", getattr, (tensors[0], "device"), name="device")
            self.device = (tensors[0].meta["val"].device, device)
        return env

    def _placeholder(self, p: inspect.Parameter) -> fx.Node:
        stars = {p.VAR_POSITIONAL: "*", p.VAR_KEYWORD: "**"}.get(p.kind, "")  # type: ignore[call-overload]
        default = None
        if p.default is p.empty or is_literal(p.default):
            default = p.default
        return self.graph.placeholder(f"{stars}{p.name}", default_value=default)

    def _outputs(self, leaves: Any) -> Any:
        if self.build is None:
            value = leaves
        else:
            value = self.build(leaves)
        if self.build is None or is_plain(value):
            return value
        self.root.pack_outputs = PackOutputs(self.build)
        return self.graph.create_node("call_module", "pack_outputs", tuple(leaves), name="pack_outputs")

    # -- the ops -------------------------------------------------------------------------------------
    def _body(self, owner: fx.GraphModule, env: dict[fx.Node, Any], no_grad: bool = False) -> Any:
        """Copy the graph of `owner`, translated; returns its output.

        `env` maps an exported node to its new value, or to a tuple or dict of the entries of its result.
        """
        self.alone |= _only_ops(owner.graph)
        for node in owner.graph.nodes:
            source = None
            if node.args and isinstance(node.args[0], fx.Node):
                source = env.get(node.args[0])
            if node.op == "output":
                return fx.map_arg(node.args[0], env.__getitem__)
            if node.op == "placeholder" or _is_aten(node, _CHECKS) or node.target == "_guards_fn":
                continue
            if node.op == "get_attr":
                env[node] = self._attribute(node, owner)
            elif _is_aten(node, _NO_OPS):
                env[node] = source
            elif node.target is operator.getitem and isinstance(source, (tuple, dict)):
                env[node] = None
                if node.users:
                    env[node] = source[node.args[1]]
            else:
                env[node] = self._inlined(node, env, no_grad) or self._translated(node, env, no_grad)
        return None

    def _inlined(self, node: fx.Node, env: dict[fx.Node, Any], no_grad: bool) -> tuple[Any, ...] | None:
        """Inline a block under `no_grad`, and a block without autocast if it has weights: others need the
        precision."""
        op = getattr(node.target, "__name__", "")
        if op not in ("wrap_with_set_grad_enabled", "wrap_with_autocast"):
            return None
        values: list[Any] = []
        for a in node.args:
            values.append(env[a] if isinstance(a, fx.Node) else a)
        if op == "wrap_with_set_grad_enabled":
            enabled, block, *values = values
            no_grad = not enabled
        else:
            _, _, enabled, _, block, *values = values
            if enabled or not _has_weights(block):
                return None
        inner = [n for n in block.graph.nodes if n.op == "placeholder"]
        return tuple(self._body(block, dict(zip(inner, values)), no_grad))

    def _translated(self, node: fx.Node, env: dict[fx.Node, Any], no_grad: bool) -> Any:
        op = node.op
        target = node.target
        args = node.args
        kwargs = node.kwargs
        item = None
        call = translate(node)
        if call is not None and (call.item is None or _is_only_use(node, call.item)):
            target, args, kwargs, item = call
            op = "call_function"
            if isinstance(target, str):
                op = "call_method"
        if op == "call_module":
            _assign(self.root, str(target), copy.deepcopy(self.exported.get_submodule(str(target))))
        args, kwargs = fx.map_arg((args, kwargs), lambda n: self._value(n, env))
        if self.device and kwargs.get("device") == self.device[0]:
            kwargs = {**kwargs, "device": self.device[1]}  # new tensors follow the inputs
        path = self._path(node, target)
        new = self.graph.create_node(op, target, args, kwargs, name=_identifier(path))
        new.meta = {k: node.meta[k] for k in ("val", "nn_module_stack", "stack_trace") if k in node.meta}
        new.meta.update({"path": path, "no_grad": no_grad})
        if item is None:
            return new
        new.meta["val"] = None
        if "val" in node.meta:
            new.meta["val"] = node.meta["val"][item]
        return {item: new}

    def _value(self, node: fx.Node, env: dict[fx.Node, Any]) -> Any:
        """The new value of a node; a block of code that a higher-order op runs becomes a submodule."""
        value = env[node]
        if not isinstance(value, nn.Module):
            return value
        name = f"code{len(self.root._modules)}"
        _assign(self.root, name, copy.deepcopy(value))
        return self.graph.get_attr(name)

    def _attribute(self, node: fx.Node, owner: fx.GraphModule) -> Any:
        value: Any = owner
        for name in str(node.target).split("."):
            value = getattr(value, name)
        if isinstance(value, nn.Module):
            return value
        if isinstance(value, Tensor) and self.clone and id(value) not in self.copies:
            copied = value.detach().clone()
            is_parameter = isinstance(value, nn.Parameter)
            if is_parameter:
                self.copies[id(value)] = nn.Parameter(copied, value.requires_grad)
            else:
                self.copies[id(value)] = copied
        block = self.blocks.setdefault(owner, f"block{len(self.blocks)}.")
        target = f"{block}{node.target}"
        _assign(self.root, target, self.copies.get(id(value), value))
        return self.graph.create_node("get_attr", target, name=_identifier(target))

    def _path(self, node: fx.Node, target: Any) -> str:
        """`layer1.0.conv1` for an op that is a torch.nn module, `layer1.0.add` for one in a user's forward."""
        _, inside, _ = _innermost(node)
        if node in self.alone:
            return inside
        if isinstance(target, str):
            name = target
        else:
            name = getattr(target, "__name__", node.name)
        return f"{inside}.{name.partition('.')[0]}".lstrip(".")


def _innermost(node: fx.Node) -> tuple[str, str, str]:
    """The module whose forward made the node: its key (one per call), its path, its class."""
    stack = node.meta.get("nn_module_stack") or {}
    key, (path, kind) = list(stack.items())[-1] if stack else ("", ("", ""))
    if not (isinstance(kind, str)):
        kind = f"{kind.__module__}.{kind.__qualname__}"
    if not path.startswith("_empty_nn_module_stack"):
        return key, path, kind
    return "", "", ""


def _only_ops(graph: fx.Graph) -> set[fx.Node]:
    """Nodes that are the only op of a torch.nn module, apart from sizes, first states and entries of tuples."""
    made: dict[str, list[fx.Node]] = defaultdict(list)
    for node in graph.nodes:
        key, path, kind = _innermost(node)
        helps = node.target is operator.getitem or _is_aten(node, {"sym_size", "zeros"})
        if node.op == "call_function" and path and kind.startswith("torch.nn.modules.") and not helps:
            made[key].append(node)
    return {nodes[0] for nodes in made.values() if len(nodes) == 1}


def _is_aten(node: fx.Node, names: set[str]) -> bool:
    op = node.target
    return isinstance(op, torch._ops.OpOverload) and op._schema.name.removeprefix("aten::") in names


def _is_only_use(node: fx.Node, item: int) -> bool:
    return all(u.target is operator.getitem and (u.args[1] == item or not u.users) for u in node.users)


def _has_weights(block: fx.GraphModule) -> bool:
    return any(_HAS_WEIGHTS.search(str(node.target)) for node in block.graph.nodes)


def _identifier(path: str) -> str:
    return re.sub(r"\W", "_", path)


def _assign(root: nn.Module, path: str, value: Any) -> None:
    """Put `value` at `path`; missing modules on the way are made."""
    *parents, last = path.split(".")
    for name in parents:
        if name not in root._modules:
            root.add_module(name, nn.Module())
        root = root.get_submodule(name)
    if isinstance(value, Tensor) and not isinstance(value, nn.Parameter):
        root.register_buffer(last, value)
    else:
        setattr(root, last, value)
