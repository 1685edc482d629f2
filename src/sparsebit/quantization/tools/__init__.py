"""Calibration and analysis tools."""

from sparsebit.quantization.tools.calibration import CalibrationRunner
from sparsebit.quantization.tools.errors_profiler import QuantizationErrorProfiler
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
