"""Legacy: where the original keeps QuantizationErrorProfiler."""

from sparsebit.quantization.analysis.errors_profiler import QuantizationErrorProfiler

__all__ = ["QuantizationErrorProfiler"]
