"""Legacy: where the original keeps CalibrationRunner."""

from sparsebit.quantization.calibration.runner import CalibrationRunner

__all__ = ["CalibrationRunner"]
