"""Sparsebit: quantize, prune and ship PyTorch models.

qmodel = sparsebit.quantize(model, batches)
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

__version__ = "1.0.0.dev0"
__all__ = ["QuantConfig", "QuantModel", "__version__", "preflight", "prune", "qat", "quantize", "verify"]

if TYPE_CHECKING:
    from torch import nn

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


def prune(
    model: Any,
    example: Any,
    ratio: float | None = None,
    *,
    macs: float | None = None,
    params: float | None = None,
    round_to: int = 1,
) -> nn.Module:
    """A smaller copy of `model`, checked on `example`: channels with small weights are removed from every layer.

    ratio     the share of channels that goes (0.5 if nothing is said), or
    macs      the share of multiplications that stays, or
    params    the share of parameters that stays.
    round_to  layers keep a multiple of this many channels.

    It has the model's own class where its code has no sizes of its own, else it is a traced graph.
    """
    from sparsebit.sparse.prune import prune as cut

    return cut(model, example, ratio, macs=macs, params=params, round_to=round_to)


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
