"""The inputs of a command by their names: model, weights, data. run.json keeps the names, and they are loaded again
from there."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from sparsebit.cli.inputs import data as data_forms
from sparsebit.cli.inputs import models
from sparsebit.cli.terminal.output import InputError, one_line
from sparsebit.cli.terminal.progress import status


@dataclass(frozen=True)
class Inputs:
    model: str
    weights: str | None = None
    data: str | None = None
    input_shape: str | None = None
    batch_size: int = 8
    samples: int = 256

    def load(self) -> tuple[Any, list[Any]]:
        """The model, and batches it has been seen to run on; without data, one of random numbers."""
        shape = None
        if self.input_shape:
            shape = data_forms.parse_shape(self.input_shape)
        for name in ("batch_size", "samples"):
            if getattr(self, name) < 1:
                raise InputError(f"--{name.replace('_', '-')}: must be at least 1, got {getattr(self, name)}")
        with status("loading the model and the data"):
            model = models.load_model(self.model, self.weights)
            batches = self._batches(model, shape)
            _check_runs(self, model, batches[0])
        return model, batches

    def _batches(self, model: Any, shape: tuple[int, ...] | None) -> list[Any]:
        if self.data is not None:
            return data_forms.load_batches(self.data, model, shape, self.batch_size, self.samples, self.model)
        if shape is not None:
            return [data_forms.random_batch(shape)]
        raise InputError(
            "the command has no input for the model: add --data, or --input-shape such as 1,3,224,224"
        )

    def absolute(self) -> dict[str, Any]:
        """For run.json: valid from any folder."""
        return asdict(self) | {
            "model": models.absolute(self.model),
            "weights": self.weights and str(Path(self.weights).resolve()),
            "data": self.data and data_forms.absolute(self.data),
        }


def example_of(model: Any, batch: Any) -> Any:
    """The inputs of the model in a batch, without labels: a tuple of arguments, or keywords."""
    args, kwargs = _call(model, batch)
    return kwargs or args


def _call(model: Any, batch: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    from torch import export

    from sparsebit.graph.run.calls import Call
    from sparsebit.graph.run.signature import signature_of

    return Call.of(
        batch, signature_of(model.module() if isinstance(model, export.ExportedProgram) else model)
    )


def _check_runs(inputs: Inputs, model: Any, batch: Any) -> None:
    """Check that the model takes the data, so that the next step is not blamed."""
    import torch
    from torch.utils import _pytree as pytree

    if isinstance(model, torch.export.ExportedProgram):
        runs = model.module()
    else:
        runs = model
    device = next((p.device for p in runs.parameters()), torch.device("cpu"))
    args, kwargs = pytree.tree_map_only(torch.Tensor, lambda x: x.to(device), _call(model, batch))
    try:
        with torch.no_grad():
            runs(*args, **kwargs)
    except Exception as error:  # the user's forward may raise anything
        shapes = [tuple(x.shape) for x in pytree.tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
        if inputs.data:
            given = f"--data {inputs.data}"
        else:
            given = f"--input-shape {inputs.input_shape}"
        raise InputError(
            f"{given}: {inputs.model} does not run on inputs of shape {', '.join(map(str, shapes))}: "
            f"{one_line(error)}{_hint(args)}"
        ) from error


def _hint(args: tuple[Any, ...]) -> str:
    """True for pictures in the layout of image files: whole numbers, and colours behind height and width."""
    import torch

    first = args[0] if args else None
    if not isinstance(first, torch.Tensor) or first.dim() != 4 or first.is_floating_point():
        return ""
    order = ""
    if first.shape[-1] in (1, 3) and first.shape[1] not in (1, 3):
        order = " with the colours on axis 1"
    return f"; it holds whole numbers: give floats as in training, mostly (x / 255 - mean) / std{order}"
