"""Which layers stay float because integers make them slower here: measured on this machine, on this model.

The quantized file and the float file are profiled op by op. Layers whose integer kernel takes longer than the float one
become float together, and the whole file is timed again. The fastest of these wins: all layers quantized, without the
slow ones, or all in float. So the file is never slower than the float file.
"""

from __future__ import annotations

import logging
import tempfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import fx

from sparsebit.export import files
from sparsebit.export.certificate import timing
from sparsebit.export.certificate.runtime import feeds, session
from sparsebit.graph.ops import called_module
from sparsebit.quantization.modules import QuantOpr
from sparsebit.quantization.quantizers import Quantizer

if TYPE_CHECKING:
    from sparsebit.quantization.export import Draft

log = logging.getLogger("sparsebit")
BETTER = 0.98  # of the time: less is the noise of a machine


def time_draft(draft: Draft, file: Path, call: tuple[Any, Any]) -> timing.Timing:
    """The times of a written draft, beside the same graph without quantizers."""
    with tempfile.TemporaryDirectory(prefix="sparsebit-") as folder:
        plain = Path(folder, "float.onnx")
        files.write(draft.plain, plain)
        return timing.timing_of(file, feeds(session(file), *call), plain)


@dataclass
class Tuning:
    """One search. `draft` exports the model in its present state."""

    qmodel: Any
    draft: Callable[[], Draft]
    call: tuple[Any, Any]

    def run(self) -> str:
        """Make slow layers float; returns a sentence for the report."""
        with tempfile.TemporaryDirectory(prefix="sparsebit-") as folder:
            self.folder = Path(folder)
            made = self.draft()
            quantized = self._write(made.graph, "quantized")
            plain = self._write(made.plain, "float")
            given = feeds(session(quantized), *self.call)
            slow = self._slower(
                made.graph, timing.profile(quantized, given)[0], timing.profile(plain, given)[0]
            )
            candidates = {"quantized": quantized, "float": plain}
            if slow:
                with self._float(slow):
                    candidates["mixed"] = self._write(self.draft().graph, "mixed")
            times = timing.best_times(candidates, dict.fromkeys(candidates, given))
        best = "quantized"
        if "mixed" in times and times["mixed"] < BETTER * times[best]:
            best = "mixed"
        if times["float"] < times[best]:
            best = "float"
        return self._settle(best, slow, times)

    def _write(self, graph: Any, name: str) -> Path:
        path = self.folder / f"{name}.onnx"
        files.write(graph, path)
        return path

    def _slower(
        self, graph: Any, integer: Iterable[timing.OpTime], plain: Iterable[timing.OpTime]
    ) -> list[str]:
        """The weight quantizers of layers whose integer kernel takes longer than the float one."""
        floats = {op.node: op.microseconds for op in plain}
        slow = set()
        for op in integer:
            if op.integer and op.microseconds > floats.get(op.node, float("inf")):
                slow.add(op.node)
        found = []
        for node in graph.graph:
            if node.name in slow and len(node.inputs) > 1 and node.inputs[1] is not None:
                found.append(str(node.inputs[1].name).partition("/")[0])
        return [name for name in dict.fromkeys(found) if name.endswith(".weight_quantizer")]

    def _settle(self, best: str, slow: list[str], times: dict[str, float]) -> str:
        shown = ", ".join(f"{name} {ms:.3g} ms" for name, ms in times.items())
        if best == "quantized":
            return f"tuned on this machine: every layer stays as it was ({shown})"
        if best == "mixed":
            self._make_float(slow)
            names = [name.removesuffix(".weight_quantizer") for name in slow]
            listed = ", ".join(names[:3]) + (" ..." if len(names) > 3 else "")
            return f"tuned on this machine: {len(names)} layers stay float ({listed}; {shown})"
        self._make_float([name for name, _ in self.qmodel.named_quantizers()])
        log.warning(
            "tune: integers do not make this model faster on this machine; the file is float (%s)", shown
        )
        return f"tuned on this machine: integers do not make it faster, so the file is float ({shown})"

    @contextmanager
    def _float(self, names: list[str]) -> Iterator[None]:
        """Inside the block these layers are float."""
        modules = list(self.qmodel.model.modules())
        saved = [(m, m.absorbed) for m in modules if isinstance(m, Quantizer)]
        corrections = [(m, m.bias_correction) for m in modules if isinstance(m, QuantOpr)]
        try:
            self._make_float(names)
            yield
        finally:
            for quantizer, absorbed in saved:
                quantizer.absorbed = absorbed
            for module, correction in corrections:
                module.bias_correction = correction

    def _make_float(self, names: Iterable[str]) -> None:
        """Switch these quantizers off, and those of inputs that no integer op hands on."""
        wanted = set(names)
        gm = self.qmodel.model
        for node in gm.graph.nodes:
            module = called_module(node, gm)
            if not isinstance(module, QuantOpr):
                continue
            weight = module.weight_quantizer
            inputs = module.input_quantizer
            if weight is not None and weight.name in wanted:
                weight.set_fake_fused()
                if module.bias_correction is not None:  # it made up for the rounding of the weight
                    module.bias_correction = torch.zeros_like(module.bias_correction)
                if inputs is not None and _is_float(node.all_input_nodes[:1], gm):
                    inputs.set_fake_fused()
            if inputs is not None and inputs.name in wanted:
                inputs.set_fake_fused()


def _is_float(sources: list[fx.Node], gm: fx.GraphModule) -> bool:
    """Is the value an input of the model, or the output of a float layer?"""
    for source in sources:
        module = called_module(source, gm)
        if isinstance(module, QuantOpr) and module.weight_quantizer is not None:
            return module.weight_quantizer.absorbed
        if module is not None:
            return False
    return all(source.op in ("placeholder", "get_attr") for source in sources)
