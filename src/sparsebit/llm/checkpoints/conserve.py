"""A check that no tensor is lost: the checkpoint has every tensor of the source, unchanged, packed, or tied to
another."""

from __future__ import annotations

from collections.abc import Iterable

from sparsebit.errors import SparsebitError
from sparsebit.llm.formats import Format
from sparsebit.llm.models.names import Names, packed_layers
from sparsebit.llm.models.sources import InMemory, tied_names


def check_conserved(source: InMemory, layers: Iterable[str], layout: Format, written: Iterable[str]) -> None:
    """Raises an error with the names that are missing or unknown; config.json is written only afterwards.

    layers   that are quantized, by their names in the model.
    written  names in the files.
    """
    written = set(written)
    layers = list(layers)
    floats, packed = _sorted_out(written, layout, source.names)
    plan = source.names.plan(floats - set(source.extra), lambda key: ())
    arrived = set(plan.made) | {f"{layer}.weight" for layer in packed}
    for stack, parts in source.names.parts.items():
        owner = stack.rpartition(".")[0]
        if all(f"{owner}.{part.layer}" in packed for part in parts):
            arrived.add(stack)
    tied = tied_names(source.model)
    lost = [name for name in source.names.state if name not in arrived and name not in tied]
    lost += [name for name in source.extra if name not in written]
    _complain(source, "tensors of the model are in none of the files that were written", lost)
    if not layout.plain:
        _complain(source, "layers should be packed and are not", [n for n in layers if n not in packed])
    _complain(source, "tensors were written that the model has no place for", plan.extra)


def _sorted_out(written: set[str], layout: Format, names: Names) -> tuple[set[str], set[str]]:
    """Names of float tensors in the files, and packed layers by their names in the model."""
    if layout.plain:
        return written, set()
    layers = packed_layers(written, layout.suffixes)
    packed = set()
    for layer in layers:
        for suffix in layout.suffixes:
            packed.add(f"{layer}.{suffix}")
    return written - packed, {names.layer(key) for key in layers}


def _complain(source: InMemory, what: str, names: list[str]) -> None:
    if names:
        shown = ", ".join(repr(name) for name in names[:5]) + (", ..." if len(names) > 5 else "")
        raise SparsebitError(
            f"{source.folder or type(source.model).__name__}: {len(names)} {what}: {shown}; no config.json was "
            "written, so that this folder is not mistaken for a checkpoint; please report it with the name of the model"
        )
