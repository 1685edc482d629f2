"""The few edits that passes share. None of them recompiles: `run_passes` does that once per pass."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping

from torch import fx, nn

from sparsebit.errors import GraphError
from sparsebit.graph.ops import has_effect


def bypass(node: fx.Node, by: fx.Node) -> None:
    """Let `by` take the place of `node` everywhere, and erase `node`."""
    node.replace_all_uses_with(by)
    node.graph.erase_node(node)


def replace_module(gm: fx.GraphModule, node: fx.Node, name: str, module: nn.Module) -> None:
    """`replace_modules` for one node."""
    replace_modules(gm, {node: (name, module)})


def replace_modules(gm: fx.GraphModule, new: Mapping[fx.Node, tuple[str, nn.Module]]) -> None:
    """Turn nodes into calls of new modules {node: (name, module)}; their names, arguments and meta stay.

    A module that already has one of the names and that other nodes call gets another name. So shared modules,
    and the function `add` beside a submodule `add`, stay correct. The time is linear in the size of the
    graph.
    """
    names = {name for name, _ in new.values()}
    if len(names) < len(new):
        raise GraphError("replace_modules: two nodes got the same module name; pass the node's own name")
    for name, others in _other_users(gm, names, new).items():
        aside = fresh_name(gm, f"{name}_shared")
        gm.add_submodule(aside, gm.get_submodule(name))
        for other in others:
            other.target = aside + str(other.target)[len(name) :]
    for node, (name, module) in new.items():
        _set_module(gm, name, module)
        node.op = "call_module"
        node.target = name


def _other_users(
    gm: fx.GraphModule, names: set[str], new: Mapping[fx.Node, tuple[str, nn.Module]]
) -> dict[str, list[fx.Node]]:
    """Nodes outside of `new` that call a module of one of these names, or something inside it."""
    others: dict[str, list[fx.Node]] = defaultdict(list)
    for node in gm.graph.nodes:
        if node.op in ("call_module", "get_attr") and node not in new:
            hit = next((path for path in _prefixes(str(node.target)) if path in names), None)
            if hit is not None:
                others[hit].append(node)
    return others


def _set_module(gm: fx.GraphModule, name: str, module: nn.Module) -> None:
    try:
        done = gm.add_submodule(name, module)
    except KeyError:  # torch: "attribute already exists"
        done = False
    if not done:
        raise GraphError(
            f"{name}: no module can stand here, the model has an attribute of that name; choose another"
        )


def insert_module_before(
    gm: fx.GraphModule, node: fx.Node, arg: fx.Node, name: str, module: nn.Module
) -> fx.Node:
    """Put `module` between `arg` and `node` (wherever `node` uses `arg`); returns the node that calls it.

    The module is stored under `name`, with a number added if that is taken.
    """
    name = fresh_name(gm, name)
    _set_module(gm, name, module)
    with node.graph.inserting_before(node):
        call = node.graph.create_node("call_module", name, (arg,), name=name)
    call.meta["path"] = name
    node.replace_input_with(arg, call)
    return call


def fresh_name(gm: fx.GraphModule, name: str) -> str:
    """`name`, or `name_1`, `name_2` ... if the model already has that name."""
    count = 0
    fresh = name
    while _is_taken(gm, fresh):
        count += 1
        fresh = f"{name}_{count}"
    return fresh


def _is_taken(gm: fx.GraphModule, path: str) -> bool:
    found: object = gm
    for name in path.split("."):
        if not hasattr(found, name):
            return False
        found = getattr(found, name)
    return True


def erase_unused(nodes: Iterable[fx.Node], gm: fx.GraphModule) -> int:
    """Erase those of `nodes` that have no reader, with or without side effects, and inputs that only they
    needed.

    It is for nodes that a rewrite replaced. Placeholders and the output stay (the signature is the user's).
    """
    erased = 0
    replaced = dict.fromkeys(nodes)
    todo = list(replaced)
    while todo:
        node = todo.pop()
        if node._erased or node.users or node.op in ("placeholder", "output"):
            continue
        if node not in replaced and has_effect(node, gm):
            continue
        todo.extend(node.all_input_nodes)
        gm.graph.erase_node(node)
        erased += 1
    return erased


def remove_dead_code(gm: fx.GraphModule) -> int:
    """Erase nodes that do not reach the output; placeholders and side effects stay. Returns how many were
    erased."""
    dead = 0
    for node in reversed(gm.graph.nodes):
        if not node.users and not has_effect(node, gm):
            gm.graph.erase_node(node)
            dead += 1
    return dead


def remove_unused_modules(gm: fx.GraphModule) -> int:
    """Delete submodules that no node calls or reads, in one walk (fx's delete_all_unused_submodules is
    quadratic)."""
    whole: set[str] = set()  # called: kept with everything inside
    path: set[str] = set()  # on the way to something used
    for node in gm.graph.nodes:
        if node.op in ("call_module", "get_attr"):
            whole.add(str(node.target))
            path.update(_prefixes(str(node.target)))

    def sweep(module: nn.Module, prefix: str) -> int:
        gone = 0
        for name, child in list(module._modules.items()):
            full = f"{prefix}{name}"
            if full not in path:
                del module._modules[name]
                gone += 1
            elif full not in whole and child is not None:
                gone += sweep(child, f"{full}.")
        return gone

    return sweep(gm, "")


def remove_unread_tensors(gm: fx.GraphModule) -> int:
    """Delete parameters and buffers that no node reads and no called module holds. Returns how many were
    deleted."""
    read = {str(node.target) for node in gm.graph.nodes if node.op in ("call_module", "get_attr")}
    gone = 0
    for path, module in gm.named_modules():
        if path and not read.isdisjoint(_prefixes(path)):
            continue  # called, with everything inside
        for store in (module._parameters, module._buffers):
            for name in [n for n in store if f"{path}.{n}".lstrip(".") not in read]:
                del store[name]
                gone += 1
    return gone


def _prefixes(target: str) -> list[str]:
    """`a.b.c` -> a, a.b, a.b.c"""
    parts = target.split(".")
    return [".".join(parts[: i + 1]) for i in range(len(parts))]
