"""Legacy: the tools of the original Sparsebit under their old names. Today they are in `calibration` and `analysis`."""

from sparsebit.quantization.analysis.errors_profiler import QuantizationErrorProfiler
from sparsebit.quantization.calibration.runner import CalibrationRunner
from sparsebit.quantization.tools.graph_wrapper import GraphVisitor, SharedData, fx_symbolic_trace
from sparsebit.quantization.tools.tensor_wrapper import to_cpu, to_detach, to_device

__all__ = [
    "CalibrationRunner",
    "GraphVisitor",
    "QuantizationErrorProfiler",
    "SharedData",
    "fx_symbolic_trace",
    "to_cpu",
    "to_detach",
    "to_device",
]
