"""QuantModel: the lifecycle of a quantized model. What happens to the graph is in pipeline.py."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import fx, nn

from sparsebit.errors import CalibrationError, TraceError
from sparsebit.graph.draw import to_mermaid
from sparsebit.graph.islands import Island, warn_of
from sparsebit.graph.passes import GraphPass, PassReport, run_passes
from sparsebit.graph.pickling import Picklable
from sparsebit.graph.run.calls import Call, device_of
from sparsebit.graph.run.signature import show_signature, signature_of
from sparsebit.graph.trace.guards import with_unread
from sparsebit.quantization import qat
from sparsebit.quantization.calibration.batchnorm_folding import mirror_negative_norms
from sparsebit.quantization.calibration.float_choice import choose_float_forms, forget_float_forms
from sparsebit.quantization.calibration.runner import CalibrationRunner
from sparsebit.quantization.checkpoint import load_checkpoint, save_checkpoint
from sparsebit.quantization.converters.fuse_operations.reuse_memory import makers_of, reuse_memory
from sparsebit.quantization.legacy_state import read_original
from sparsebit.quantization.modules import QuantOpr
from sparsebit.quantization.observers.ranks import world_size
from sparsebit.quantization.pipeline import (
    CONVERT_PASSES,
    FINAL_PASSES,
    FUSE_PASSES,
    QUANTIZER_PASSES,
    SIMPLIFIERS,
    BuildContext,
)
from sparsebit.quantization.quant_config import QuantConfig
from sparsebit.quantization.quantizers import Quantizer
from sparsebit.quantization.trace.auto_trace import choose_front_end
from sparsebit.quantization.trace.first_batch import fits, take_over, waiting_for_batch, was_changed
from sparsebit.quantization.trace.front_end import refuse_other_inputs, to_graph

if TYPE_CHECKING:
    from sparsebit.export.report import ExportReport
    from sparsebit.quantization.analysis.preflight import Preflight
    from sparsebit.quantization.analysis.profile import Profile

__all__ = ["QuantModel"]

log = logging.getLogger("sparsebit")


class QuantModel(nn.Module):
    """A quantizable copy of `model`; the model itself is never changed.

    model    an nn.Module, or what torch.export made of one.
    config   a QuantConfig, a YAML path, a mapping or a preset name; None is the default preset.
    example  one batch, in any form that calibrate() takes: it shows which optional inputs are used and proves the
             traced graph. Without one, the first forward shows it; until then optional inputs keep their defaults.
    trace    "fx": torch.fx. A part that it cannot trace runs unchanged, with its layers quantized in place.
             "export": torch.export. It needs `example`, and also quantizes matmul and add of such parts.
             "auto": torch.fx, and torch.export if there is an example and more of the model becomes integer with it.
             The report names the choice and the reason.
    passes   your own graph passes, run after the built-in ones.
    check    example arguments. If given, every pass must keep the float output; an error names the pass that does not.
    """

    def __init__(
        self,
        model: nn.Module | torch.export.ExportedProgram,
        config: Any = None,
        *,
        example: Any = None,
        trace: str = "auto",
        passes: Sequence[GraphPass | Callable[..., int]] = (),
        check: tuple[Any, ...] | None = None,
    ):
        super().__init__()
        self.cfg = QuantConfig.load(config)
        self._options = {"example": example, "trace": trace, "passes": passes, "check": check}
        self._context = BuildContext(self.cfg, example)
        self.pass_reports: list[PassReport] = []
        self.model = self._trace(model)
        self._run_simplifiers()
        self._convert2quantmodule()
        self._build_quantizer()
        self._run_fuse_operations()
        if trace == "auto" and example is not None:
            self._choose_front_end(model)
        warn_of(self.islands)
        self._watch_graph()
        self._waiting = waiting_for_batch(model, self.model, self._options)
        show_signature(self, self.model.meta.get("signature"))
        self.float_ops = self._context.float_ops
        self.training = self.model.training
        self.calibration_runner: CalibrationRunner | None = None  # while a calibration is under way
        self.enable_qat = self.norms_frozen = False
        if not any(True for _ in self.named_quantizers()):
            log.warning("no op of %s has a quantizer: nothing will be quantized", self.model._get_name())
        if self.float_ops:
            kinds = sorted(set(self.float_ops.values()))
            log.info("%d ops stay float, no QModule for: %s", len(self.float_ops), ", ".join(kinds))

    # -- the five steps of the constructor: a subclass may override any of them ----------------------
    def _trace(self, model: Any) -> fx.GraphModule:
        """The model as a graph over a copy of everything it holds."""
        return to_graph(model, self.cfg, self._options["example"], self._options["trace"])

    def _run_simplifiers(self) -> None:
        """Bring the graph of torch ops into the few forms that the next steps know."""
        self._run_passes(SIMPLIFIERS)

    def _convert2quantmodule(self) -> None:
        """Replace every op that has a QModule."""
        self._run_passes(CONVERT_PASSES)

    def _build_quantizer(self) -> None:
        """Attach the quantizers that the config asks for."""
        self._run_passes(QUANTIZER_PASSES)

    def _run_fuse_operations(self) -> None:
        """Fold batch norms, and switch off the quantizers that no runtime has; then the passes of the user."""
        own = []
        for p in self._options["passes"]:
            own.append(p if isinstance(p, GraphPass) else GraphPass(p.__name__, p))
        self._run_passes([*FUSE_PASSES, *own, *FINAL_PASSES])

    def _choose_front_end(self, model: Any) -> None:
        """Take the graph of torch.export, if more of it becomes integer."""
        chosen = choose_front_end(self, self._options["example"], lambda: self._built_again(model, "export"))
        if chosen is not self:
            self._take(chosen)

    def _built_again(self, model: Any, trace: str, **changed: Any) -> QuantModel:
        """Another QuantModel of `model`, with what a subclass has set up for its own steps."""
        fresh = object.__new__(type(self))
        fresh.__dict__.update(self.__dict__)
        QuantModel.__init__(fresh, model, self.cfg, **{**self._options, **changed, "trace": trace})
        return fresh

    def _take(self, other: QuantModel) -> None:
        """Take the graph of `other`, and all that is known about it."""
        self.model = other.model
        self.pass_reports = other.pass_reports
        self._context = other._context
        self.float_ops = other.float_ops

    def _run_passes(self, passes: Sequence[GraphPass]) -> None:
        self.pass_reports += run_passes(self.model, passes, self._context, self._options["check"])

    # -- running -------------------------------------------------------------------------------------
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if self._waiting is not None:
            self._decide_inputs(args, kwargs)
        if self.model.meta.get("unread_inputs"):
            args, kwargs = with_unread(self.model, args, kwargs)
        if self.model.meta["fixed"]:
            refuse_other_inputs(self.model, args, kwargs)
        if not torch.compiler.is_compiling() and self._graph_changed():
            reuse_memory(self.model)  # the readers of values may have changed
            self._watch_graph()
        running = self.model.meta["running"]
        running.add("forward")
        try:
            return self.model(*args, **kwargs)
        finally:
            running.clear()

    def _decide_inputs(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """The first batch of a model without an example: if it does not fit the graph, trace the model again."""
        waiting = self._waiting
        self._waiting = None
        if waiting is None or was_changed(self.model, waiting) or fits(self.model, args, kwargs):
            return
        # by torch.fx, as the first graph: layers keep their names
        fresh = self._built_again(waiting.source, "fx", example=Call(args, kwargs))
        fresh.model.to(self.device)
        take_over(self.model, fresh.model, waiting)
        fresh.model.train(self.training)
        self._take(fresh)
        self._watch_graph()
        show_signature(self, self.model.meta.get("signature"))
        if self.calibration_runner is not None:
            self.prepare_calibration(asym=self.calibration_runner.store is not None)

    def _graph_changed(self) -> bool:
        """Has the user changed the graph or its modules?"""
        modules = self.model._modules
        return self.model._code is not self._code or any(modules.get(n) is not m for n, m in self._makers)

    def _watch_graph(self) -> None:
        self._code = self.model._code
        self._makers = makers_of(self.model)

    # -- calibration ---------------------------------------------------------------------------------
    def prepare_calibration(self, asym: bool = True) -> None:
        """Start observing: run your batches through the model next, then call calc_qparams().

        `asym=False` promises that calc_qparams(asym=True) will not follow; then no inputs are kept on disk.
        """
        from sparsebit.quantization.reconstruction.reconstruct import needs_reconstruction

        self._stop_calibration()
        self.set_quant(False, False)
        self.eval()
        mirror_negative_norms(self.model)
        self.calibration_runner = CalibrationRunner(
            self.model,
            keep_inputs=asym or needs_reconstruction(self.model),
            trims=self.cfg.backend == "onnxruntime" and self.cfg.schedule.enabled("trim_ranges"),
        )
        self.calibration_runner.prepare_calibration()

    def calc_qparams(
        self,
        asym: bool = False,
        w_quant: bool = False,
        a_quant: bool = False,
        *,
        offload: str = "device",
        checkpoint: str | Path | None = None,
        progress: bool | None = None,
    ) -> None:
        """Compute scales and zero points from the observed values.

        `asym` calibrates each layer on the outputs of its quantized predecessors; `w_quant` and `a_quant` choose
        whether their weights and activations are quantized (both, if neither is named). All batches then walk the
        graph together; `offload` is the place where their values wait: "device", "cpu" or "disk". Weights of type
        adaround are reconstructed next; `checkpoint` and `progress` are those of reconstruct().
        """
        from sparsebit.quantization.reconstruction.reconstruct import needs_reconstruction, reconstruct

        if self.calibration_runner is None:
            raise CalibrationError(
                "calc_qparams() needs a calibration that is under way: call prepare_calibration(), run some "
                "batches, then calc_qparams() once"
            )
        self.calibration_runner.layerwise_calibration(self.device, asym, w_quant, a_quant, offload)
        forget_float_forms(self.model)
        if self.cfg.schedule.enabled("float_forms") and world_size() == 1:
            choose_float_forms(self.model, self.calibration_runner.samples.calls)
        if needs_reconstruction(self.model):
            w = w_quant or not a_quant
            a = a_quant or not w_quant
            reconstruct(
                self.model,
                self.calibration_runner.inputs(),
                w_quant=w,
                a_quant=a,
                offload=offload,
                checkpoint=checkpoint,
                progress=progress,
            )
        self._stop_calibration()

    def _stop_calibration(self) -> None:
        if self.calibration_runner is not None:
            self.calibration_runner.close()
        self.calibration_runner = None

    def calibrate(
        self,
        batches: Iterable[Any],
        *,
        asym: bool = False,
        checkpoint: str | Path | None = None,
        progress: bool | None = None,
    ) -> QuantModel:
        """The whole calibration over `batches` (tensors, tuples, dicts, or a DataLoader of (x, y)).

        checkpoint  a folder: an interrupted learning of the rounding is resumed behind the last finished block.
        """
        from sparsebit.graph.run.batches import feed

        self.prepare_calibration(asym=asym)
        try:
            feed(self, batches, progress)
            self.calc_qparams(asym=asym, checkpoint=checkpoint, progress=progress)
        finally:
            self._stop_calibration()
        return self

    def reconstruct(
        self,
        batches: Iterable[Any],
        *,
        asym: bool = True,
        checkpoint: str | Path | None = None,
        progress: bool | None = None,
        offload: str = "device",
    ) -> dict[str, tuple[float, float]]:
        """Learn the rounding of the adaround weights, block by block; calibrates first if the model is not calibrated.

        asym        blocks see the outputs of the quantized ones before them, and compensate their errors.
        checkpoint  a folder: an interrupted run is resumed behind the last finished block.
        offload     the place where values wait: "device", "cpu" or "disk".
        Returns the squared error of each block before and after, as a share of its squared output.
        """
        from sparsebit.quantization.reconstruction.reconstruct import reconstruct_model

        return reconstruct_model(
            self, batches, asym=asym, checkpoint=checkpoint, progress=progress, offload=offload
        )

    # -- quantization --------------------------------------------------------------------------------
    def set_quant(self, w_quant: bool = False, a_quant: bool = False) -> None:
        """Switch the quantization of weights and activations on or off."""
        for module in self.model.modules():
            if isinstance(module, QuantOpr):
                module.set_quant(w_quant, a_quant)

    # -- training ------------------------------------------------------------------------------------
    def init_QAT(self) -> None:
        """Calibrated scales and quantization on: the start of quantization-aware training."""
        qat.init_QAT(self)

    qat_parameter_groups = qat.parameter_groups
    freeze_batchnorm = qat.freeze_batchnorm
    fold_batchnorm = qat.fold_batchnorm

    def train(self, mode: bool = True) -> QuantModel:
        super().train(mode)
        for norm in qat.batch_norms(self) if self.norms_frozen else ():
            norm.eval()
        return self

    def named_quantizers(self) -> Iterator[tuple[str, Quantizer]]:
        """Every quantizer that is in use, by name."""
        for module in self.model.modules():
            if isinstance(module, Quantizer) and not module.absorbed and not module.unused:
                yield module.name, module

    @property
    def front_end(self) -> str:
        """The front-end that traced the model: "fx" or "export"."""
        return "export" if "by_export" in self.model.meta else "fx"

    @property
    def islands(self) -> dict[str, Island]:
        """Parts that could not be traced, by path, each with the reason. Their layers are quantized in place."""
        found: dict[str, Island] = self.model.meta["islands"]
        return found

    @property
    def device(self) -> torch.device:
        """The device of the model; config.DEVICE if the model has no parameters."""
        return device_of(self.model) or torch.device(self.cfg.device)

    # -- files ---------------------------------------------------------------------------------------
    def save(self, folder: str | Path) -> None:
        """Write weights and scales (safetensors) and the config (YAML) into `folder`."""
        save_checkpoint(self, Path(folder))

    @classmethod
    def load(cls, folder: str | Path, model: nn.Module, **options: Any) -> QuantModel:
        """A saved QuantModel again; `model` is the float model it was made from, `options` go to QuantModel."""

        def build(config: Path, front_end: str) -> QuantModel:
            if front_end == "export" and options.get("example") is None and isinstance(model, nn.Module):
                raise TraceError(
                    f"{folder}: the model was traced by torch.export: load(folder, model, example=batch)"
                )
            how = {"trace": front_end} if front_end else {}
            return cls(model, config, **{**how, **options})

        qmodel: QuantModel = load_checkpoint(build, Path(folder))
        return qmodel

    def __getstate__(self) -> dict[str, Any]:
        """For pickle and torch.save; `torch.load(file, weights_only=False)` reads it. save() is safer and smaller."""
        state = {**self.__dict__, "_modules": {**self._modules, "model": Picklable(self.model)}}
        state.pop("forward", None)
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        show_signature(self, self.model.meta.get("signature"))

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        """A state dict of the original gets our names first."""
        read_original(self.model, state_dict, f"{prefix}model.", *args)
        super()._load_from_state_dict(state_dict, prefix, *args)

    # -- tools ---------------------------------------------------------------------------------------
    def dump_mermaid(self, f: Any) -> None:
        """Write the graph as a mermaid diagram into the open file `f`."""
        from sparsebit.quantization.layers import bits_label

        f.write(to_mermaid(self.model, bits_label(self.model)))

    def preflight(self, example: Any = None) -> Preflight:
        """A table: the quantizers of each op, the ops that stay float and the reasons; with an example also MACs and
        memory."""
        from sparsebit.quantization.analysis.preflight import preflight

        return preflight(self, example)

    def profile(self, batches: Any, *, progress: bool | None = None) -> Profile:
        """Layers ranked by the noise they add to themselves and to the output, and the override that helps each."""
        from sparsebit.quantization.analysis.profile import profile

        return profile(self, batches, progress=progress)

    def batchnorm_tuning(self) -> AbstractContextManager[None]:
        """`with qmodel.batchnorm_tuning(): qmodel(x)`: batch norms that fit the quantized network, then folded.

        Needs a calibrated model built with SCHEDULE.BN_TUNING: true.
        """
        from sparsebit.quantization.calibration.batchnorm_tuning import batchnorm_tuning

        return batchnorm_tuning(self)

    def get_quantization_error(
        self, data: Any, checker: Callable[..., Any] = nn.functional.mse_loss, is_async: bool = True
    ) -> dict[str, Any]:
        """The error of each layer's output: quantized alone (async), or with everything before it (sync)."""
        from sparsebit.quantization.tools import QuantizationErrorProfiler

        return QuantizationErrorProfiler(self.model).apply(data, checker, is_async)

    def export_onnx(
        self,
        dummy_data: Any,
        name: str,
        input_names: list[str] | None = None,
        output_names: list[str] | None = None,
        dynamic_axes: Any = None,
        opset_version: int = 13,
        verbose: bool = False,
        extra_info: bool = False,
        *,
        dynamic_shapes: Any = None,
        backend: str | None = None,
        batches: Any = (),
        timing: bool = False,
        tune: bool = False,
    ) -> ExportReport:
        """Write an ONNX file that has been run and agrees with this model; returns how it was checked.

        dummy_data      arguments as calibrate() takes a batch: a tensor, a tuple, a dict.
        dynamic_axes    `{"input": {0: "batch"}}` as in the old exporter, or dynamic_shapes as in torch.export.
        opset_version   the least opset; a higher one is written where the types need it.
        extra_info      also write <name>_extra.onnx with a `bits` attribute on every Q/DQ node.
        backend         onnxruntime, tensorrt, openvino or virtual; None is BACKEND of the config.
        batches         more inputs to compare the file and the model on.
        timing          time the file and the float file in onnxruntime, op by op: report.timing.
        tune            for this machine: layers that integers make slower become float, in this model and in the file.
                        A file that is slower than the float one cannot come out.
        """
        from sparsebit.quantization.export import export_onnx

        if self._waiting is not None:  # no batch has come yet
            self._decide_inputs(*Call.of(dummy_data, signature_of(self)))
        return export_onnx(
            self,
            dummy_data,
            name,
            backend=backend,
            batches=batches,
            input_names=input_names,
            output_names=output_names,
            dynamic_axes=dynamic_axes,
            dynamic_shapes=dynamic_shapes,
            opset_version=opset_version,
            verbose=verbose,
            extra_info=extra_info,
            timing=timing,
            tune=tune,
        )

    def add_extra_info_to_onnx(self, onnx_path: str) -> None:
        """Write <name>_extra.onnx beside an exported file: a `bits` attribute on every Q/DQ node."""
        from sparsebit.export.onnx.extra_info import write_extra

        write_extra(onnx_path)
