"""The inputs and outputs of an exported graph: the user's structures, and a check that inputs fit the graph.

torch.export fixes everything that the forward looked at: flags, sizes in an `if`, which inputs are None. The
graph would compute a wrong output for other inputs, so InputCheck refuses them.
"""

from __future__ import annotations

import inspect
import operator
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.utils import _pytree as pytree

from sparsebit.errors import TraceError

UNKNOWN = object()
Step = tuple[Any, Any]  # (operator.getitem, key) or (getattr, name)
Build = Callable[[Sequence[Any]], Any]  # leaves -> the value that contains them


def leaves_of(arguments: dict[str, Any]) -> Iterator[tuple[str, list[Step], Any]]:
    """(argument, the steps from its value to the leaf, leaf) for every leaf of the arguments."""
    for path, leaf in pytree.tree_flatten_with_path(arguments)[0]:
        argument, *keys = path
        steps = []
        for k in keys:
            steps.append(
                (getattr, k.name) if isinstance(k, pytree.GetAttrKey) else (operator.getitem, _index(k))
            )
        yield argument.key, steps, leaf  # type: ignore[attr-defined]


def _index(key: Any) -> Any:
    if isinstance(key, pytree.SequenceKey):
        return key.idx
    return key.key


def arguments_of(
    exported: fx.GraphModule, signature: inspect.Signature | None
) -> tuple[inspect.Signature, dict[str, Any]]:
    """The signature of the forward, and the value of each parameter with exported placeholders as leaves."""
    placeholders = [n for n in exported.graph.nodes if n.op == "placeholder"]
    info = getattr(exported.graph._codegen, "pytree_info", None)
    if info is None:  # a plain graph
        signature = inspect.signature(exported.forward)
        return signature, dict(zip(signature.parameters, placeholders))
    args, kwargs = pytree.tree_unflatten(placeholders, info.in_spec)
    if signature is None:
        names = [name for name in info.orig_args if name != "self"][: len(args)]
        signature = _signature(names, args, kwargs)
    bound = signature.bind(*args, **kwargs)
    bound.apply_defaults()
    return signature, dict(bound.arguments)


def _signature(names: list[str], args: tuple[Any, ...], kwargs: dict[str, Any]) -> inspect.Signature:
    """All parameters by position or name. A parameter that is constant in the graph is optional, where Python
    allows it."""
    parameters: list[inspect.Parameter] = []
    kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
    empty = inspect.Parameter.empty
    optional = True
    for name, value in reversed([*zip(names, args), *kwargs.items()]):
        if isinstance(value, fx.Node):
            constant = value.meta.get("val", UNKNOWN)
        else:
            constant = UNKNOWN
        optional = optional and is_literal(constant)
        parameters.insert(0, inspect.Parameter(name, kind, default=constant if optional else empty))
    return inspect.Signature(parameters)


def is_literal(value: Any) -> bool:
    """Can torch.fx write it into the code of a graph?"""
    return value is None or type(value) in (bool, int, float, str)


class InputCheck(nn.Module):
    """Refuses inputs that do not fit the graph; called with all arguments of the forward, by name."""

    bookkeeping = True
    _is_impure = True  # torch.fx keeps the call although its result has no reader

    def __init__(self, arguments: dict[str, Any], exported: fx.GraphModule):
        super().__init__()
        self.wanted = {_name(a, steps): _wanted(leaf) for a, steps, leaf in leaves_of(arguments)}
        self.guards = [*_guards(leaf for _, _, leaf in leaves_of(arguments)), *_in_range(exported)]
        self.accepted: set[Any] = set()  # sizes that fulfil the guards

    def forward(self, **arguments: Any) -> None:
        if torch.compiler.is_compiling():
            return
        given = {_name(a, steps): leaf for a, steps, leaf in leaves_of(arguments)}
        for name in [*self.wanted, *given]:
            if name not in given or name not in self.wanted:
                what = "was not there when the model was exported"
                if name in self.wanted:
                    what = "is missing"
                raise TraceError(f"input {name} {what}\n  fix: {_FIX}")
        sizes: dict[Any, int] = {}
        for name, wanted in self.wanted.items():
            trouble = _compare(given[name], wanted, sizes)
            if trouble:
                raise TraceError(f"input {name}: the exported graph is made for {trouble}\n  fix: {_FIX}")
        key = tuple(sizes.values())
        for guard in () if key in self.accepted else self.guards:
            known = {symbol: sizes[symbol] for symbol in guard.free_symbols if symbol in sizes}
            if len(known) == len(guard.free_symbols) and guard.subs(known) == False:  # noqa: E712  sympy's false
                raise TraceError(f"the exported graph needs {guard}, but got {known}\n  fix: {_FIX}")
        self.accepted.add(key)


_FIX = "export the model with an example like this input"


def check_call(
    exported: fx.GraphModule, signature: inspect.Signature, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> None:
    """Raise if the exported graph is not made for this call."""
    signature, arguments = arguments_of(exported, signature)
    bound = signature.bind(*args, **kwargs)
    bound.apply_defaults()
    InputCheck(arguments, exported)(**bound.arguments)


class PackOutputs(nn.Module):
    """Builds the model's output from its leaves."""

    bookkeeping = True

    def __init__(self, build: Build):
        super().__init__()
        self.build = build

    def forward(self, *leaves: Any) -> Any:
        return self.build(leaves)

    def __deepcopy__(self, memo: Any) -> PackOutputs:
        return PackOutputs(self.build)


def take_apart(value: Any, leaves: list[Any], seen: tuple[int, ...] = ()) -> Build | None:
    """Append the tensors inside `value` to `leaves`; returns a function that rebuilds the value from all
    leaves.

    None if there are no tensors inside. It works for containers, and for any object that keeps tensors in its
    attributes.
    """
    if isinstance(value, (Tensor, torch.SymInt, torch.SymFloat, torch.SymBool)):
        leaves.append(value)
        return operator.itemgetter(len(leaves) - 1)
    if is_literal(value) or isinstance(value, (type, nn.Module)) or id(value) in seen:
        return None
    parts, spec = pytree.tree_flatten(value, is_leaf=lambda v: v is not value)
    known = len(parts) != 1 or parts[0] is not value
    if not known:  # not a container for torch
        parts = list(getattr(value, "__dict__", {}).values())
    builds = [take_apart(part, leaves, (*seen, id(value))) for part in parts]
    if not any(builds):
        return None
    remade = lambda all_leaves: [p if b is None else b(all_leaves) for p, b in zip(parts, builds)]
    if known:
        return lambda all_leaves: pytree.tree_unflatten(remade(all_leaves), spec)
    cls = type(value)
    names = list(vars(value))
    return lambda all_leaves: _object(cls, zip(names, remade(all_leaves)))


def _object(cls: Any, attributes: Iterable[tuple[str, Any]]) -> Any:
    new = cls.__new__(cls)
    new.__dict__.update(attributes)
    return new


def is_plain(value: Any) -> bool:
    """Can torch.fx return it: nodes and literals in tuples, lists and dicts?"""
    if type(value) in (tuple, list):
        return all(map(is_plain, value))
    if type(value) is dict:
        return all(isinstance(k, str) and is_plain(v) for k, v in value.items())
    return isinstance(value, fx.Node) or is_literal(value)


def _name(argument: str, steps: list[Step]) -> str:
    return argument + "".join(f".{k}" if get is getattr else f"[{k!r}]" for get, k in steps)


def _wanted(leaf: Any) -> Any:
    """The requirement for a leaf: a tuple of sizes (numbers or expressions), or a constant."""
    if isinstance(leaf, fx.Node):
        value = leaf.meta.get("val", UNKNOWN)
    else:
        value = leaf
    if isinstance(value, Tensor):
        sizes = []
        for size in value.shape:
            sizes.append(size if isinstance(size, int) else size.node.expr)
        return tuple(int(size) if isinstance(size, int) or size.is_number else size for size in sizes)
    if isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool)):
        return UNKNOWN
    return value


def _compare(value: Any, wanted: Any, sizes: dict[Any, int]) -> str:
    """The expected form in place of `value`, or ""; adds the sizes of symbols."""
    if wanted is UNKNOWN:
        return ""
    if not isinstance(wanted, tuple):
        same = value is wanted or (
            type(value) is type(wanted) and not isinstance(value, Tensor) and value == wanted
        )
        return "" if same else f"the constant {wanted!r}"
    if not isinstance(value, Tensor) or value.dim() != len(wanted):
        return f"a tensor of {len(wanted)} axes, not {getattr(value, 'shape', value)}"
    for axis, (size, want) in enumerate(zip(value.shape, wanted)):
        if not isinstance(want, int) and want.is_Symbol:
            want = sizes.setdefault(want, size)
        elif not isinstance(want, int) and want.free_symbols <= sizes.keys():
            want = int(want.subs(sizes))
        if isinstance(want, int) and want != size:
            return f"size {want} of axis {axis}, not {size}"
    return ""


def _guards(leaves: Iterator[Any]) -> list[Any]:
    """The conditions on sizes that torch.export found, as sympy relations."""
    for leaf in leaves:
        value = None
        if isinstance(leaf, fx.Node):
            value = leaf.meta.get("val")
        mode = getattr(value, "fake_mode", None)
        if mode is not None and mode.shape_env is not None:
            return [guard.expr for guard in mode.shape_env.guards]
    return []


def _in_range(exported: fx.GraphModule) -> list[Any]:
    """Bounds of sizes. A lower bound of 2 only means that torch.export did not try 0 and 1."""
    ranges = getattr(exported, "range_constraints", None) or {}
    usual = 1 if exported.meta.get("not_for_one") else 2
    low = [symbol >= r.lower for symbol, r in ranges.items() if r.lower > usual]
    return low + [symbol <= r.upper for symbol, r in ranges.items() if r.upper.is_finite and r.upper < 2**31]
