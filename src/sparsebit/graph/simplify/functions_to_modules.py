"""functions_to_modules: `F.linear(x, self.w)` becomes a call of an nn.Linear that holds the same parameter.

Afterwards every op with weights is a module, and later passes know one form. A matrix product with a constant
2-D right operand becomes a Linear too. A call whose options are computed stays a function.
"""

from __future__ import annotations

import re
from collections import defaultdict
from typing import Any

import torch
from torch import Tensor, fx, nn

from sparsebit.graph.ops import module_of, op_of
from sparsebit.graph.passes import graph_pass
from sparsebit.graph.rewrite import fresh_name
from sparsebit.graph.simplify.fold_constants import attribute, transposed
from sparsebit.graph.simplify.recurrent_forms import RNNS, describe_rnn, read_rnn, rewire_rnn
from sparsebit.graph.simplify.weighted_forms import FORMS, Form, Matmul, NotAModule, rank_of

# `fc.weight` -> `fc`, `in_proj_weight` -> `in_proj`
_STEM = re.compile(r"[._]?(weight(_[gv])?|running_mean)$")
_PARAMETRIZED = re.compile(r"\.parametrizations\.(\w+)\.original\d*$")


@graph_pass("functions_to_modules", keeps_output=True)
def functions_to_modules(gm: fx.GraphModule, ctx: Any = None) -> int:
    rewrite = _Rewrite(gm)
    changes = 0
    for node in list(gm.graph.nodes):
        op = op_of(node, gm)
        if op in FORMS:
            changes += rewrite.convert(node, FORMS[op])
        elif op in RNNS:
            changes += rewrite.convert_rnn(node, op)
    return changes


class _Rewrite:
    """One run of the pass. Calls with the same weights share one module."""

    def __init__(self, gm: fx.GraphModule):
        self.gm = gm
        self.made: dict[Any, str] = {}  # (class, options, tensors, path) -> name of the module
        # made of buffers and transposed weights, by the id of the source
        self.parameters: dict[int, nn.Parameter] = {}
        self.sources: list[Tensor] = []  # kept alive, so that their ids are not used again
        self.called = {str(n.target) for n in gm.graph.nodes if n.op == "call_module"}
        # weights that only matrix products read: these may be replaced by their transposes
        self.only_products = {
            key for key, users in _users_of_tensors(gm).items() if self._are_products(users)
        }

    def convert(self, node: fx.Node, form: Form) -> bool:
        values = form.bind(node)
        if values is None:
            return False
        nodes = {slot: values.get(slot) for slot in form.slots}
        tensors: dict[str, Any] = {slot: self._tensor(form, slot, value) for slot, value in nodes.items()}
        if any(t is None and nodes[slot] is not None for slot, t in tensors.items()):
            return False
        if tensors[form.slots[0]] is None or not _static(values, form):
            return False
        try:
            cls, options = form.describe({**values, **tensors}, rank_of(values.get("input"), self.gm))
        except NotAModule:
            return False
        path = self._path(node, nodes.get("weight") or nodes[form.slots[0]])
        self._use(node, path, cls, options, tensors)
        node.args, node.kwargs = form.inputs_of(values)
        return True

    def convert_rnn(self, node: fx.Node, op: Any) -> bool:
        values = read_rnn(node)
        params: Any = () if values is None else values["params"]
        weights = []
        for w in (attribute(self.gm, p) for p in params):
            if w is not None:
                weights.append(w)
        made = None
        if values and len(weights) == len(params):
            made = describe_rnn(op, values, weights)
        if made is None or values is None:
            return False
        path = str(params[0].target).rpartition(".")[0] or str(node.meta.get("path", node.name))
        self._use(node, path, *made)
        rewire_rnn(node, made[0], values)
        return True

    def _use(
        self, node: fx.Node, path: str, cls: type[nn.Module], options: dict[str, Any], tensors: dict[str, Any]
    ) -> None:
        """Let `node` call the module with these options and tensors; one module for all calls of the same."""
        key = (cls, repr(sorted(options.items())), tuple(map(id, tensors.values())), path)
        if key not in self.made:
            self.made[key] = fresh_name(self.gm, path.replace(".", "_"))
            self.gm.add_submodule(self.made[key], self._build(cls, options, tensors))
        node.op = "call_module"
        node.target = self.made[key]
        node.meta["path"] = path

    def _build(
        self, cls: type[nn.Module], options: dict[str, Any], tensors: dict[str, Tensor | None]
    ) -> nn.Module:
        module = cls(**options, device="meta").eval()
        for name, tensor in tensors.items():
            if name in module._buffers:
                module._buffers[name] = tensor
            else:
                setattr(module, name, None if tensor is None else self._parameter(tensor))
        if "num_batches_tracked" in module._buffers:
            module._buffers["num_batches_tracked"] = torch.tensor(0)
        return module

    def _parameter(self, tensor: Tensor) -> nn.Parameter:
        """The parameter itself; for a buffer, one parameter."""
        if isinstance(tensor, nn.Parameter):
            return tensor
        self.sources.append(tensor)
        return self.parameters.setdefault(id(tensor), nn.Parameter(tensor, requires_grad=False))

    def _tensor(self, form: Form, slot: str, value: Any) -> Tensor | None:
        """The constant in a slot; the weight of a Linear for the right operand of a matrix product."""
        if not isinstance(form, Matmul) or slot != "weight":
            return attribute(self.gm, value)
        source = transposed(self.gm, value)
        if source is not None:
            return attribute(self.gm, source)
        weight = attribute(self.gm, value)
        if weight is None or weight.dim() != 2 or id(weight) not in self.only_products:
            return None
        if id(weight) not in self.parameters:
            self.sources.append(weight)
            copy = weight.detach().t().contiguous()
            self.parameters[id(weight)] = nn.Parameter(copy, requires_grad=weight.requires_grad)
        return self.parameters[id(weight)]

    def _are_products(self, users: list[fx.Node]) -> bool:
        forms = [(user, FORMS.get(op_of(user, self.gm))) for user in users]
        return all(isinstance(form, Matmul) and form.weight_of(user) is not None for user, form in forms)

    def _path(self, node: fx.Node, weight: Any) -> str:
        """The path of the parameter, with its name in the module that makes the call, if that module owns it."""
        source = transposed(self.gm, weight) or weight
        target = _PARAMETRIZED.sub(r".\1", str(source.meta.get("path", source.target)))
        stack = node.meta.get("nn_module_stack") or {}
        inside = ""
        if stack:
            inside = next(reversed(list(stack.values())))[0]
        tensor = attribute(self.gm, source)
        for name, owned in _tensors_of(self.gm, inside):
            if owned is tensor:
                target = f"{inside}.{name}"
        path = _STEM.sub("", target)
        if not path or path in self.called:  # the weight of a module that is also called
            return str(node.meta.get("path", node.name))
        return path


def _tensors_of(gm: fx.GraphModule, path: str) -> list[tuple[str, Tensor]]:
    """Parameters and buffers directly in the submodule `path`, if it exists."""
    found: Any = gm if path else None
    for name in path.split("."):
        found = getattr(found, name, None)
    if not isinstance(found, nn.Module):
        return []
    return [*found.named_parameters(recurse=False), *found.named_buffers(recurse=False)]


def _users_of_tensors(gm: fx.GraphModule) -> dict[int, list[fx.Node]]:
    """id of a tensor -> its readers: readers of get_attr nodes, and calls of modules that hold it."""
    users: dict[int, list[fx.Node]] = defaultdict(list)
    for node in gm.graph.nodes:
        if node.op == "get_attr":
            users[id(attribute(gm, node))] += node.users
        elif node.op == "call_module":
            for tensor in module_of(node, gm).parameters():
                users[id(tensor)].append(node)
    return users


def _static(values: dict[str, Any], form: Form) -> bool:
    """Are all options literals?"""
    computed: list[fx.Node] = []
    options = {k: v for k, v in values.items() if k not in form.slots and k not in form.inputs}
    fx.map_arg(tuple(options.values()), computed.append)
    return not computed
