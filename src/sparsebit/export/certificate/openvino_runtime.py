"""OpenVINO as a second runtime for the end-to-end comparison, where it is installed."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

from sparsebit.errors import ExportError
from sparsebit.export.certificate.runtime import Array


def installed() -> bool:
    return importlib.util.find_spec("openvino") is not None


class OpenvinoSession:
    """Looks like a session of onnxruntime: get_inputs() and run(None, {name: array})."""

    def __init__(self, path: Path):
        import openvino

        try:
            # float32 between the integer kernels: half precision would add another difference
            self.model = openvino.Core().compile_model(str(path), "CPU", {"INFERENCE_PRECISION_HINT": "f32"})
        except Exception as error:  # the errors of OpenVINO have no common class
            raise ExportError(f"{path}: OpenVINO does not load the file: {error}") from error

    def get_inputs(self) -> list[Any]:
        return [_Named(port.any_name) for port in self.model.inputs]

    def run(self, _: None, given: dict[str, Array]) -> list[Array]:
        found = self.model(given)
        return [found[port] for port in self.model.outputs]


class _Named:
    def __init__(self, name: str):
        self.name = name
