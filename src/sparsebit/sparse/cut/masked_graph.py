"""MaskedGraph: the graph that a SparseModel runs. Its layers are found by path and by the name of their call."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import fx, nn

from sparsebit.graph.islands import Whole
from sparsebit.graph.run.modes import set_training, training_flags
from sparsebit.sparse.trace.names import Finder


class Container(nn.Module):
    """Takes the place of a list or block of the user's model, of which the graph calls only the layers
    inside: `layer1[0]`."""

    def __getitem__(self, key: Any) -> Any:
        if isinstance(key, slice):
            return list(self._modules.values())[key]
        if str(key) in self._modules:
            return self._modules[str(key)]
        if isinstance(key, int) and key < 0:
            return list(self._modules.values())[key]
        raise IndexError(f"no layer {key!r} here, only {', '.join(self._modules)}")

    def __len__(self) -> int:
        return len(self._modules)

    def __iter__(self) -> Iterator[Any]:
        return iter(self._modules.values())


class MaskedGraph(fx.GraphModule):
    """`smodel.model.layer1[0]`, `.get_submodule("layer1.0")` and `.layer1_0`, the name of torch.fx, give the
    same layer."""

    @classmethod
    def of(cls, gm: fx.GraphModule) -> MaskedGraph:
        """A copy of the graph over the same layers."""
        made = cls(gm, gm.graph, type(gm).__name__)
        made.meta = gm.meta
        set_training(made, training_flags(gm))
        for module in made.modules():
            if type(module) is nn.Module:  # torch.fx makes these for modules that no node calls
                module.__class__ = Container
        return made

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            found = self._layer(name)
            if found is None:
                raise
            return found

    def _layer(self, name: str) -> Any:
        """The layer with this name of a call, or with another spelling of its path."""
        if "_graph" not in self.__dict__ or name.startswith("__"):
            return None  # the object is under construction
        for node in self.graph.nodes:
            if node.op == "call_module" and node.name == name:
                return self.get_submodule(str(node.target))
        whole = self._modules.get("whole")
        if isinstance(whole, Whole) and name in whole.root._modules:
            return whole.root._modules[name]
        modules = dict(self.named_modules())
        path = Finder(modules).find(name)
        return None if path is None else modules[path]


def at_paths(gm: fx.GraphModule, plain: fx.GraphModule) -> MaskedGraph:
    """Move layers that a subclass stores by the names of torch.fx, like the original, to their paths in
    `plain`."""
    paths = {node.name: str(node.target) for node in plain.graph.nodes if node.op == "call_module"}
    known = set(paths.values())
    moved = dict[str, str]()
    for node in gm.graph.nodes:
        old = str(node.target)
        if node.op == "call_module" and old in paths and old not in known:
            node.target = moved[old] = paths[old]
    for old, path in moved.items():
        gm.add_submodule(path, gm.get_submodule(old))
        gm.delete_submodule(old)
    if moved:
        gm.recompile()
    gm.meta = {**plain.meta, **gm.meta}
    return MaskedGraph.of(gm)
