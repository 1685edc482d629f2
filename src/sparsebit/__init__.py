"""Sparsebit: quantize, prune and ship PyTorch models.

qmodel = sparsebit.quantize(model, batches)
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

__version__ = "1.0.0.dev0"
__all__ = ["QuantConfig", "QuantModel", "__version__", "preflight", "prune", "qat", "quantize", "verify"]

if TYPE_CHECKING:
    from sparsebit.export.report import ExportReport
    from sparsebit.quantization import QuantModel, qat
    from sparsebit.quantization.quant_config import QuantConfig
    from sparsebit.quantization.tools.preflight import Preflight


def quantize(
    model: Any, batches: Any, config: Any = None, *, asym: bool = False, progress: bool | None = None
) -> QuantModel:
    """A calibrated, quantizing copy of `model`.

    batches   tensors, tuples of arguments, dicts of keyword arguments, or a DataLoader of (x, y).
    config    a YAML path, a mapping, a QuantConfig or a preset name; None is a W8A8 that suits onnxruntime.
    asym      calibrate each layer behind its quantized predecessors (slower, keeps the batches).
    progress  show a progress bar; None: only on a terminal.
    """
    from sparsebit.quantization import QuantModel
    from sparsebit.quantization.feeding import first_of

    example, batches = first_of(batches)
    qmodel = QuantModel(model, config, example=example).calibrate(batches, asym=asym, progress=progress)
    qmodel.set_quant(w_quant=True, a_quant=True)
    return qmodel


def preflight(model: Any, example: Any, config: Any = None) -> Preflight:
    """What would happen to `model`, before anything long is started: quantized with what, float and why, islands,
    MACs, the memory that calibration needs, what the backend runs in integers."""
    from sparsebit.quantization import QuantModel

    return QuantModel(model, config, example=example).preflight(example)


def prune(model: Any, example: Any, ratio: float = 0.5) -> Any:
    """A smaller copy of `model`: the share `ratio` of the channels of every layer is removed, those with the smallest
    weights. The model's own class where its code has no sizes of its own, else a traced graph; checked on `example`."""
    from sparsebit.sparse.prune import prune as cut

    return cut(model, example, ratio)


def verify(onnx_path: Any, qmodel: Any, batches: Any) -> ExportReport:
    """Check an exported file against the model again: every quantizer, every op, and the outputs, on `batches`."""
    from sparsebit.quantization.exporting import verify as check

    return check(onnx_path, qmodel, batches)


def __getattr__(name: str) -> Any:
    """Names that need torch's heavier parts load when they are first used."""
    if name == "QuantModel":
        from sparsebit.quantization import QuantModel

        return QuantModel
    if name == "QuantConfig":
        from sparsebit.quantization.quant_config import QuantConfig

        return QuantConfig
    if name == "qat":
        from sparsebit.quantization import qat

        return qat
    raise AttributeError(f"module 'sparsebit' has no attribute {name!r}")
