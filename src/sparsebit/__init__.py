"""Sparsebit: quantize, prune and ship PyTorch models.

qmodel = sparsebit.quantize(model, batches)
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

__version__ = "1.0.0"
__all__ = [
    "QuantConfig",
    "QuantModel",
    "SparseModel",
    "__version__",
    "llm",
    "preflight",
    "prune",
    "qat",
    "quantize",
    "verify",
]

_OLDEST_TORCH = (2, 9)  # as in pyproject.toml


def _check_torch() -> None:
    """An old torch fails here, in one line. Its version is read from a file: importing torch takes seconds.

    The `sparsebit` command imports this before it can catch an error, so it ends here, as it does with others.
    """
    import re
    import sys
    from importlib.util import find_spec
    from pathlib import Path

    torch = find_spec("torch")
    if torch is None or torch.origin is None:  # `import torch` will tell
        return
    file = Path(torch.origin).with_name("version.py")
    found = re.search(r"^__version__ = '((\d+)\.(\d+).*)'", file.read_text() if file.is_file() else "", re.M)
    if found and (int(found[2]), int(found[3])) < _OLDEST_TORCH:
        what = (
            f"sparsebit {__version__} needs torch {'.'.join(map(str, _OLDEST_TORCH))} or newer, but torch {found[1]} "
            f"is installed: pip install --upgrade torch"
        )
        if Path(sys.argv[0]).stem == "sparsebit":
            sys.stderr.write(f"error: {what}\n")
            sys.exit(2)
        raise ImportError(what)


_check_torch()

if TYPE_CHECKING:
    from pathlib import Path

    from sparsebit import llm
    from sparsebit.export.report import ExportReport
    from sparsebit.quantization import QuantModel, qat
    from sparsebit.quantization.analysis.preflight import Preflight
    from sparsebit.quantization.quant_config import QuantConfig
    from sparsebit.sparse import SparseModel
    from sparsebit.sparse.prune import prune


def quantize(
    model: Any,
    batches: Any,
    config: Any = None,
    *,
    trace: str = "auto",
    asym: bool = False,
    checkpoint: str | Path | None = None,
    progress: bool | None = None,
) -> QuantModel:
    """A calibrated, quantizing copy of `model`.

    batches   tensors, tuples of arguments, dicts of keyword arguments, or a DataLoader of (x, y).
    config    a YAML path, a mapping, a QuantConfig or a preset name; None is a W8A8 that suits onnxruntime. A mapping
              without BACKEND changes that preset.
    trace     "fx", "export" or "auto": how the graph is found, see QuantModel.
    asym      calibrate each layer behind its quantized predecessors (slower, keeps the batches).
    checkpoint  a folder: an interrupted learning of the rounding is resumed there, behind the last finished block.
    progress  show a progress bar; None: only on a terminal.
    """
    from sparsebit.graph.run.batches import first_of
    from sparsebit.quantization import QuantModel
    from sparsebit.quantization.trace.auto_trace import has_other_sizes
    from sparsebit.utils.progress import bar

    if trace == "auto" and has_other_sizes(batches):
        trace = "fx"
    example, batches = first_of(batches)
    with bar("tracing", None, progress):
        qmodel = QuantModel(model, config, example=example, trace=trace)
    qmodel.calibrate(batches, asym=asym, checkpoint=checkpoint, progress=progress)
    qmodel.set_quant(w_quant=True, a_quant=True)
    return qmodel


def preflight(model: Any, example: Any, config: Any = None, *, trace: str = "auto") -> Preflight:
    """The result of a quantization, before any long work: the quantizers of each op, the ops that stay float and the
    reasons, islands, MACs, the memory of calibration, and the ops that the backend runs in integers.

    config and trace are those of `quantize`.
    """
    from sparsebit.quantization import QuantModel

    return QuantModel(model, config, example=example, trace=trace).preflight(example)


def verify(onnx_path: Any, model: Any, batches: Any) -> ExportReport:
    """Check an exported file against its model again, on `batches`: every quantizer, every op, and the outputs.

    Of an ordinary model, pruned or not, the outputs are compared.
    """
    from sparsebit.export.export_module import verify_module
    from sparsebit.quantization import QuantModel
    from sparsebit.quantization.export import verify as check

    return (check if isinstance(model, QuantModel) else verify_module)(onnx_path, model, batches)


def __getattr__(name: str) -> Any:
    """Names that need torch's heavier parts load when they are first used."""
    if name == "QuantModel":
        from sparsebit.quantization import QuantModel

        return QuantModel
    if name == "QuantConfig":
        from sparsebit.quantization.quant_config import QuantConfig

        return QuantConfig
    if name == "prune":
        from sparsebit.sparse.prune import prune

        return prune
    if name == "SparseModel":
        from sparsebit.sparse import SparseModel

        return SparseModel
    if name == "llm":
        import importlib

        return importlib.import_module("sparsebit.llm")
    if name == "qat":
        from sparsebit.quantization import qat

        return qat
    raise AttributeError(f"module 'sparsebit' has no attribute {name!r}")


def __dir__() -> list[str]:
    """List the names that are not loaded yet, too."""
    return sorted({*globals(), *__all__})
