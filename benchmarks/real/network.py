"""What the benchmark knows about a network."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch

from real.feeds import Array, Batch, batches_of, save_batches
from real.place import Place

Measure = Callable[[Array], float]  # the metric over these rows of the outputs


class Network:
    """Prepares its float file and data; judges outputs.

    name      in the table and on the command line.
    metric    what `measure` returns; higher is better.
    batch     samples per batch of data.
    axes      dynamic_axes of the files, or None where the file has fixed shapes.
    attention  NNCF's `model_type=TRANSFORMER` is asked for.
    """

    name: str
    metric: str
    batch: ClassVar[int] = 1
    axes: ClassVar[dict[str, dict[int, str]] | None] = None
    attention: ClassVar[bool] = False

    def prepare(self, place: Place) -> None:
        """Write the float file, the batches and the truth."""
        raise NotImplementedError

    def model(self, place: Place) -> torch.nn.Module:
        """The float model in torch; a file that exists only as ONNX comes in through onnx2torch."""
        return from_onnx(place.file("float"))

    def measure(self, place: Place, outputs: list[Array]) -> Measure:
        raise NotImplementedError

    def judged(self, rows: int) -> Array:
        """The rows of the outputs that were not calibrated on."""
        return np.arange(rows)

    def samples(self, rows: int) -> Array:
        """What is resampled, where one sample is not one row."""
        return self.judged(rows)

    def rows(self, outputs: list[Array], samples: int) -> list[Array]:
        """The outputs with one row per sample of the data."""
        return outputs

    def also(self, place: Place, outputs: list[Array]) -> dict[str, float]:
        """More figures, for the reader."""
        return {}


def from_onnx(file: Path) -> torch.nn.Module:
    import onnx

    import minilm

    minilm.shim()  # a torchvision that does not fit torch's build must not stop transformers and onnx2torch
    import onnx2torch

    import real.onnx_lstm  # noqa: F401  onnx2torch has no LSTM of its own
    from real.constants import written_down

    return written_down(onnx2torch.convert(onnx.load(file)).eval())


def save_data(place: Place, calibrate: list[Batch], judge: list[Batch], timed: Batch | None = None) -> None:
    save_batches(place.calibrate, calibrate)
    save_batches(place.judge, judge)
    first = {name: value[:1] for name, value in judge[0].items()}
    save_batches(place.timed, [timed or first])


def save_images(place: Place, name: str, calibrate: Array, judge: Array, size: int) -> None:
    save_data(place, batches_of(name, calibrate, size), batches_of(name, judge, size))


def call_of(batch: Batch) -> Any:
    """A batch as the model in torch takes it: one input by place, several by name."""
    tensors = {name: torch.from_numpy(value) for name, value in batch.items()}
    return tensors if len(tensors) > 1 else next(iter(tensors.values()))


def run(model: torch.nn.Module, batches: Any) -> list[Array]:
    """The outputs of the model in torch, all batches together."""
    found: list[list[Array]] = []
    with torch.no_grad():
        for batch in batches:
            call = call_of(batch)
            out = model(**call) if isinstance(call, dict) else model(call)
            found.append([part.numpy() for part in ((out,) if torch.is_tensor(out) else out)])
    return [np.concatenate(part) for part in zip(*found)]
