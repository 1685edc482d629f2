"""Calibration: observers stream during the user's own forwards; `asym` walks the graph, all batches in lock step."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, fx, nn

from sparsebit.errors import CalibrationError
from sparsebit.graph.lanes import Batch, Lane, Store
from sparsebit.graph.ops import module_of
from sparsebit.quantization.modules import QuantOpr, quant_mode
from sparsebit.quantization.quantizers import Mode, Quantizer
from sparsebit.quantization.tools.bias_correction import InputMean
from sparsebit.quantization.tools.distributed import any_rank, merge_means, over_ranks

log = logging.getLogger("sparsebit")


class CalibrationRunner:
    """One calibration of `model`: `prepare_calibration`, forwards, `layerwise_calibration`.

    Without `asym` nothing is cached. Because old scripts ask for `asym` only after their forwards, the model's
    inputs (and nothing else) are also put on disk, unless `keep_inputs` is False.
    """

    def __init__(self, model: fx.GraphModule, keep_inputs: bool = True):
        self.model = model
        self.means: dict[QuantOpr, InputMean] = {}
        self.batches: list[Any] = []
        self.forwards = 0
        self.store: Store | None = Store("disk") if keep_inputs else None
        self.why_no_inputs = "prepare_calibration(asym=False) was told not to keep the inputs"

    def prepare_calibration(self) -> None:
        """Let every active input quantizer observe."""
        for equalization in self._equalizations():
            equalization.unfold()
        for quantizer in self._input_quantizers():
            quantizer.reset()
            quantizer.mode = Mode.OBSERVE
        for module in self.model.modules():
            if isinstance(module, QuantOpr) and module.bias_correction is not None:
                module.drop_correction()
                self.means[module] = InputMean(module)

    def record(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Remember the inputs of one forward, on disk; a full disk only costs the `asym` option."""
        self.forwards += 1
        if self.store is None:
            return
        try:
            self.batches.append(self.store.put((args, kwargs)))
        except OSError as error:
            self.why_no_inputs = f"the inputs could not be kept on disk ({error})"
            log.warning("calibration goes on, but asym=True will not work: %s", self.why_no_inputs)
            self.close()

    def inputs(self) -> Sequence[Batch]:
        """The inputs of all forwards so far."""
        if self.store is None:
            raise CalibrationError(f"the inputs are needed again, but {self.why_no_inputs}")
        return _Recorded(self.batches, self.store)

    def close(self) -> None:
        """The end of a calibration, finished or not: nobody observes any more."""
        for quantizer in _quantizers(self.model):
            if quantizer.mode is Mode.OBSERVE:
                quantizer.mode = Mode.FLOAT
            quantizer.observer.reset()
        for mean in self.means.values():
            mean.handle.remove()
        self.means.clear()
        self.batches.clear()
        if self.store is not None:
            self.store.close()
        self.store = None

    def layerwise_calibration(
        self,
        device: Any = None,
        asym: bool = False,
        w_quant: bool = False,
        a_quant: bool = False,
        offload: str = "device",
    ) -> None:
        """Turn what was observed into scales. With `asym`, observe again behind the quantized predecessors."""
        quantizers = list(self._input_quantizers())
        if quantizers and not any_rank(self.forwards > 0 or any(q.observer.has_data for q in quantizers)):
            raise CalibrationError(
                "no calibration data: run some batches through the model between prepare_calibration() and "
                "calc_qparams()"
            )
        for quantizer in quantizers:
            quantizer.mode = Mode.FLOAT
        if asym:
            if self.store is None:
                raise CalibrationError(
                    f"calc_qparams(asym=True) needs the inputs again, but {self.why_no_inputs}"
                )
            for mean in self.means.values():
                mean.reset()
            batches = _Recorded(self.batches, self.store)
            calibrate_asym(self.model, batches, w_quant or not a_quant, a_quant or not w_quant, offload)
        else:
            for module in self.model.modules():
                if isinstance(module, QuantOpr):
                    calibrate_input(module)
                    calibrate_weight(module)
        merge_means(self.means.values(), device or torch.device("cpu"))
        for equalization in self._equalizations():
            self._fold(equalization)
        for mean in self.means.values():
            mean.apply()

    def _fold(self, equalization: Any) -> None:
        """Fold, then give the changed weights new scales, and the mean of the changed value its new unit."""
        factor = equalization.fold()
        if factor is None:
            return
        calibrate_weight(equalization.conv)
        calibrate_weight(equalization.depthwise)
        if equalization.depthwise in self.means:
            self.means[equalization.depthwise].divide(factor)

    def _equalizations(self) -> list[Any]:
        return [m.equalization for m in self.model.modules() if isinstance(m, QuantOpr) and m.equalization]

    def _input_quantizers(self) -> Iterable[Quantizer]:
        inputs = (m.input_quantizer for m in self.model.modules() if isinstance(m, QuantOpr))
        return [q for q in inputs if q is not None and not q.absorbed]


class _Recorded(Sequence[Any]):
    """Batches that wait on disk; each is read when it is needed."""

    def __init__(self, kept: list[Any], store: Store):
        self.kept, self.store = kept, store

    def __getitem__(self, i: Any) -> Any:
        return self.store.get(self.kept[i])

    def __len__(self) -> int:
        return len(self.kept)


def _quantizers(model: nn.Module) -> Iterable[Quantizer]:
    return (m for m in model.modules() if isinstance(m, Quantizer))


def calibrate_input(module: QuantOpr) -> None:
    """The grid of a layer's input; a quantizer that never saw a float tensor is switched off by name."""
    quantizer = module.input_quantizer
    if quantizer is None or quantizer.absorbed:
        return
    with over_ranks(quantizer):
        if quantizer.observer.has_data:
            quantizer.calc_qparams()
            return
    log.warning("%s saw no floating-point data during calibration: it stays float", quantizer.name)
    quantizer.set_unused()


@torch.no_grad()
def calibrate_weight(module: QuantOpr) -> None:
    quantizer = module.weight_quantizer
    if quantizer is None or quantizer.absorbed:
        return
    assert isinstance(module.weight, Tensor)
    quantizer.reset()
    quantizer.update_observer(module.weight)
    quantizer.calc_qparams()


@torch.no_grad()
def calibrate_asym(
    model: fx.GraphModule,
    batches: Sequence[Batch],
    w_quant: bool = True,
    a_quant: bool = True,
    offload: str = "device",
) -> None:
    """Walk the graph once: each layer is calibrated on the outputs of its quantized predecessors, then quantized."""
    store = Store(offload)
    lane = Lane(model, batches, store)
    done: set[nn.Module] = set()
    for node in model.graph.nodes:
        module = module_of(node, model) if node.op == "call_module" else None
        if module is None:
            lane.step(node)
            continue
        _calibrate_call(lane, node, module, done)
        with quant_mode(module, w=w_quant, a=a_quant):
            lane.step(node)
    store.close()


def _calibrate_call(lane: Lane, node: fx.Node, module: nn.Module, done: set[nn.Module]) -> None:
    """Calibrate what a node runs; the layers inside an island see each other in float."""
    inside = [m for m in module.modules() if isinstance(m, QuantOpr)]
    observing = [m for m in inside if m.input_quantizer is not None and not m.input_quantizer.absorbed]
    for m in observing:
        assert m.input_quantizer is not None
        if m not in done:
            m.input_quantizer.reset()
        m.input_quantizer.mode = Mode.OBSERVE
    try:
        for args, kwargs in lane.inputs(node) if observing else ():
            if inside == [module]:
                inside[0].quantize_first(args, kwargs)  # its input is all that matters
            else:
                module(*args, **kwargs)
    finally:
        for m in observing:
            assert m.input_quantizer is not None
            m.input_quantizer.mode = Mode.FLOAT
    for m in inside:
        calibrate_input(m)
        if m not in done:
            calibrate_weight(m)
    done.update(inside)
