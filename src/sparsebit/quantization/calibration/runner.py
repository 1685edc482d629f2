"""Calibration: observers stream during the user's own forwards; `asym` walks the graph, all batches in lock step."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, fx, nn

from sparsebit.errors import CalibrationError
from sparsebit.graph.ops import module_of
from sparsebit.graph.run.calls import Call
from sparsebit.graph.run.lanes import Lane
from sparsebit.graph.run.stores import Store
from sparsebit.quantization.calibration.bias_correction import InputMean
from sparsebit.quantization.calibration.distributed import any_rank, merge_means, over_ranks
from sparsebit.quantization.calibration.range_choice import choose_ranges
from sparsebit.quantization.calibration.samples import Samples
from sparsebit.quantization.calibration.saturation import trim_ranges
from sparsebit.quantization.modules import QuantOpr, quant_mode
from sparsebit.quantization.quantizers import Mode, Quantizer

log = logging.getLogger("sparsebit")


class CalibrationRunner:
    """One calibration of `model`: `prepare_calibration`, forwards, `layerwise_calibration`.

    Without `asym` nothing is cached. Because old scripts ask for `asym` only after their forwards, the model's
    inputs (and nothing else) are also put on disk, unless `keep_inputs` is False.

    A subclass may override `run_feature_calibration`, `run_weight_calibration` and `module_forward`: they are called
    for each node, in the order of the graph.
    """

    def __init__(self, model: fx.GraphModule, keep_inputs: bool = True, trims: bool = False):
        """`trims`: the ranges of values behind which an activation saturates end there (saturation.py)."""
        self.model = model
        self.trims = trims
        self.means: dict[QuantOpr, InputMean] = {}
        self.batches: list[Any] = []
        self.forwards = 0
        self.samples = Samples()
        self.store: Store | None = Store("disk") if keep_inputs else None
        self.why_no_inputs = "prepare_calibration(asym=False) was told not to keep the inputs"
        self.offload = "device"
        self._lanes: dict[bool, Lane] = {}  # asym -> the values of all batches, as far as the walk has come
        self._done: set[nn.Module] = set()
        self._hook: Any = None

    def prepare_calibration(self) -> None:
        """Let every active input quantizer observe, and remember the inputs of every forward."""
        self._hook = self.model.register_forward_pre_hook(self.record, with_kwargs=True)
        for equalization in self._equalizations():
            equalization.unfold()
        for quantizer in self._input_quantizers():
            quantizer.reset()
            quantizer.mode = Mode.OBSERVE
        for module in self.model.modules():
            if isinstance(module, QuantOpr) and module.bias_correction is not None:
                module.drop_correction()
                self.means[module] = InputMean(module)

    def record(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Remember the inputs of one forward, on disk; a full disk only costs the `asym` option."""
        self.forwards += 1
        self.samples.see(Call(args, kwargs))
        if self.store is None:
            return
        try:
            self.batches.append(self.store.put((args, kwargs)))
        except OSError as error:
            self.why_no_inputs = f"the inputs could not be kept on disk ({error})"
            log.warning("calibration goes on, but asym=True will not work: %s", self.why_no_inputs)
            self.close()

    def inputs(self) -> Sequence[Call]:
        """The inputs of all forwards so far."""
        if self.store is None:
            raise CalibrationError(f"the inputs are needed again, but {self.why_no_inputs}")
        return _Recorded(self.batches, self.store)

    def close(self) -> None:
        """The end of a calibration, finished or not: the observers are switched off."""
        for quantizer in _quantizers(self.model):
            if quantizer.mode is Mode.OBSERVE:
                quantizer.mode = Mode.FLOAT
            quantizer.observer.reset()
        if self._hook is not None:
            self._hook.remove()
        self._drop_lanes()
        for mean in self.means.values():
            mean.handle.remove()
        self.means.clear()
        self.batches.clear()
        self.samples = Samples()
        if self.store is not None:
            self.store.close()
        self.store = None

    @torch.no_grad()
    def layerwise_calibration(
        self,
        device: Any = None,
        asym: bool = False,
        w_quant: bool = False,
        a_quant: bool = False,
        offload: str = "device",
    ) -> None:
        """Turn the observations into scales. With `asym`, observe again behind the quantized predecessors."""
        quantizers = list(self._input_quantizers())
        if quantizers and not any_rank(self.forwards > 0 or any(q.observer.has_data for q in quantizers)):
            raise CalibrationError(
                "no calibration data: run some batches through the model between prepare_calibration() and "
                "calc_qparams()"
            )
        for quantizer in quantizers:
            quantizer.mode = Mode.FLOAT
        if self._hook is not None:
            self._hook.remove()  # what runs from here on is not calibration data
        if asym:
            self.inputs()  # refuses before any work
            for mean in self.means.values():
                mean.reset()
        self.offload = offload
        self._drop_lanes()
        self._done.clear()
        w_quant, a_quant = w_quant or not a_quant, a_quant or not w_quant
        for node in self.model.graph.nodes:
            self.run_feature_calibration(node, asym)
            self.run_weight_calibration(node, asym, a_quant)
            if asym:
                self._step(node, asym, w_quant, a_quant)
        self._drop_lanes()
        merge_means(self.means.values(), device or torch.device("cpu"))
        self._share_grids()
        choose_ranges(self.model, self.samples.calls)
        if self.trims:
            trim_ranges(self.model)
        for equalization in self._equalizations():
            self._fold(equalization)
        for mean in self.means.values():
            mean.apply()

    def run_feature_calibration(self, node: fx.Node, asym: bool = False) -> None:
        """The grids of the inputs of what `node` runs.

        They come from what the observers saw in the forwards; with `asym`, from the values that the quantized layers
        before `node` give. Layers inside an island see each other in float.
        """
        oprs = self._oprs(node)
        if asym:
            self._observe(node, oprs)
        for opr in oprs:
            if asym or opr not in self._done:
                calibrate_input(opr)

    def run_weight_calibration(self, node: fx.Node, asym: bool = False, a_quant: bool = False) -> None:
        """The grids of the weights of what `node` runs, once for a layer that is called several times.

        `asym` and `a_quant` say how the layers before it ran; a subclass that learns weights may ask.
        """
        for opr in self._oprs(node):
            if opr not in self._done:
                calibrate_weight(opr)
                self._done.add(opr)

    @torch.no_grad()
    def module_forward(
        self,
        batch_num: int | None,
        node: fx.Node,
        device: Any = None,
        asym: bool = False,
        w_quant: bool = False,
        a_quant: bool = False,
    ) -> list[Any]:
        """Run `node` on the batches of the forwards: in float, or with `asym` behind the quantized layers before it.

        Nodes come in the order of the graph. Returns the output of every batch; `batch_num` and `device` are those
        of the recorded batches, whatever is passed.
        """
        if node.op == "output":
            return []
        self._step(node, asym, w_quant, a_quant, keep=True)
        return list(self._lane(asym).outputs(node))

    def _step(self, node: fx.Node, asym: bool, w_quant: bool, a_quant: bool, keep: bool = False) -> None:
        lane = self._lane(asym)
        if node.op != "call_module" or not asym:
            lane.step(node, keep)
            return
        with quant_mode(module_of(node, self.model), w=w_quant, a=a_quant):
            lane.step(node, keep)

    def _lane(self, asym: bool) -> Lane:
        if asym not in self._lanes:
            self._lanes[asym] = Lane(self.model, self.inputs(), Store(self.offload))
        return self._lanes[asym]

    def _drop_lanes(self) -> None:
        for lane in self._lanes.values():
            lane.store.close()
        self._lanes.clear()

    def _oprs(self, node: fx.Node) -> list[QuantOpr]:
        if node.op != "call_module":
            return []
        return [m for m in module_of(node, self.model).modules() if isinstance(m, QuantOpr)]

    def _observe(self, node: fx.Node, oprs: list[QuantOpr]) -> None:
        """Show the observers of a node what its inputs are in the quantized lane."""
        quantizers = {opr: opr.input_quantizer for opr in oprs}
        active = {opr: q for opr, q in quantizers.items() if q is not None and not q.absorbed}
        if not active:
            return
        module = module_of(node, self.model)
        for opr, quantizer in active.items():
            if opr not in self._done:
                quantizer.reset()
            quantizer.mode = Mode.OBSERVE
        try:
            for args, kwargs in self._lane(asym=True).inputs(node):
                if oprs == [module]:
                    oprs[0].quantize_first(args, kwargs)  # its input is all that matters
                else:
                    module(*args, **kwargs)
        finally:
            for quantizer in active.values():
                quantizer.mode = Mode.FLOAT

    def _share_grids(self) -> None:
        """Quantizers that read one value have one grid."""
        ties = {id(q.tied): q.tied for q in self._input_quantizers() if q.tied}
        for tied in ties.values():
            members = [q for q in tied if not q.unused and not q.absorbed and q.spec == tied[0].spec]
            if len(members) > 1:
                members[0].share_grid(members)

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
        self.kept = kept
        self.store = store

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
    quantizer.fit_pairs(module.weight)
