"""Reconstruction: learn the rounding of each unit's weights so that its output is that of the float network.

Two lanes walk the graph: the float one gives the targets, the quantized one (`asym`) the inputs, so that a unit also
compensates the errors before it (Li et al., BRECQ, 2021). A finished unit can be kept in a folder, where an interrupted
run is resumed.
"""

from __future__ import annotations

import hashlib
import logging
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import fx

from sparsebit.errors import CalibrationError, ConfigError
from sparsebit.graph.ops import module_of
from sparsebit.graph.run.calls import Call
from sparsebit.graph.run.lanes import Lane
from sparsebit.graph.run.signature import signature_of
from sparsebit.graph.run.stores import Store
from sparsebit.quantization.calibration.distributed import of_first_rank
from sparsebit.quantization.modules import QuantOpr, quant_mode
from sparsebit.quantization.observers.ranks import world_size
from sparsebit.quantization.quantizers.adaround import AdaRoundQuantizer
from sparsebit.quantization.reconstruction.unit_learning import Samples, State, UnitLearning, weight_quantizer
from sparsebit.quantization.reconstruction.units import Unit, find_units
from sparsebit.utils.progress import bar

log = logging.getLogger("sparsebit")

Errors = dict[str, tuple[float, float]]


def learns_rounding(module: Any) -> bool:
    quantizer = None
    if isinstance(module, QuantOpr):
        quantizer = module.weight_quantizer
    return isinstance(quantizer, AdaRoundQuantizer) and not quantizer.absorbed


def needs_reconstruction(gm: fx.GraphModule) -> bool:
    return any(map(learns_rounding, gm.modules()))


def reconstruct_model(qmodel: Any, batches: Any, **options: Any) -> Errors:
    """QuantModel.reconstruct: calibrate if the model is not calibrated, then reconstruct."""
    from sparsebit.graph.run.batches import as_iterable, feed

    if not needs_reconstruction(qmodel.model):
        raise ConfigError("reconstruct(): no weight learns its rounding; set W.QUANTIZER.TYPE: adaround")
    batches = list(as_iterable(batches))
    if not all(quantizer.calibrated for _, quantizer in qmodel.named_quantizers()):
        qmodel.prepare_calibration(asym=False)
        try:
            feed(qmodel, batches, options["progress"])
            qmodel.calibration_runner.layerwise_calibration(qmodel.device)
        finally:
            qmodel._stop_calibration()
    qmodel.eval()
    signature = signature_of(qmodel)
    device = qmodel.device
    calls = [Call.of(batch, signature).to(device) for batch in batches]
    return reconstruct(qmodel.model, calls, **options)


def reconstruct(
    gm: fx.GraphModule,
    batches: Sequence[Call],
    *,
    asym: bool = True,
    w_quant: bool = True,
    a_quant: bool = True,
    offload: str = "device",
    checkpoint: str | Path | None = None,
    progress: bool | None = None,
) -> Errors:
    """Learn the rounding of every adaround weight of a calibrated graph; returns each unit's relative squared error
    before and after. `w_quant` and `a_quant` choose whether weights and activations of the layers before a unit are
    quantized."""
    layers = [m for m in gm.modules() if isinstance(m, QuantOpr) and learns_rounding(m)]
    if not layers:
        return {}
    units = find_units(gm, learns_rounding, weight_quantizer(layers[0]).params.unit)
    store = Store(offload)
    walk = _Walk(gm, batches, store, asym, w_quant, a_quant)
    finished = None
    if checkpoint is not None:
        finished = Finished(Path(checkpoint))
    errors: Errors = {}
    try:
        with bar("reconstructing", len(units), progress) as show:
            for unit in units:
                walk.to(unit)
                with quantized(gm, unit.nodes, True, a_quant):
                    errors[unit.name] = _do(unit, walk, len(errors), finished, show)
                log.info("%s: squared error %.2e -> %.2e", unit.name, *errors[unit.name])
                walk.past(unit)
    finally:
        store.close()
    return errors


def _do(unit: Unit, walk: _Walk, index: int, finished: Finished | None, show: Any) -> tuple[float, float]:
    work = UnitLearning(unit, walk.gm, walk.samples, walk.compute(unit), seed=index)
    key = "" if finished is None else _fingerprint(unit, walk)
    if finished is None:
        known = None
    else:
        known = finished.load(index, key, work)
    if known is not None:
        return known
    steps = work.options.steps
    errors = work.run(lambda step, loss: show(index + step / steps, f"{unit.name}: loss {loss:.3f}"))
    if world_size() > 1:  # every rank learned from its own batches: the first one's weights are everybody's
        state = State(work.modules)
        state.values, errors = of_first_rank((state.values, errors), state.values[0].device)
        state.restore()
    if finished is not None:
        finished.save(index, key, work, errors)
    return errors


class _Walk:
    """The lanes on their way through the graph, unit by unit."""

    def __init__(
        self, gm: fx.GraphModule, batches: Sequence[Call], store: Store, asym: bool, w: bool, a: bool
    ):
        self.gm = gm
        self.store = store
        self.modes = (w, a)
        self.float_lane = _Lane(gm, batches, store)
        self.quant_lane = _Lane(gm, batches, store) if asym else None
        self.left = list(gm.graph.nodes)

    def to(self, unit: Unit) -> None:
        """Up to the unit: its inputs and its float outputs are `samples` then."""
        at = self.left.index(unit.nodes[0])
        self._run_both(self.left[:at])
        self.left = self.left[at + len(unit.nodes) :]
        lanes = (self.quant_lane or self.float_lane, self.float_lane)
        inputs, exact = ([{n: v[n] for n in unit.inputs} for v in lane.values] for lane in lanes)
        with quantized(self.gm, unit.nodes, False, False):
            self.float_lane.run(unit.nodes)
        targets = []
        for values in self.float_lane.values:
            targets.append([values[n] for n in unit.outputs])
        self.samples = Samples(unit, self.store, inputs, exact if self.quant_lane else inputs, targets)

    def past(self, unit: Unit) -> None:
        """Run the unit with its present weights."""
        del self.samples
        if self.quant_lane is not None:
            with quantized(self.gm, unit.nodes, *self.modes):
                self.quant_lane.run(unit.nodes)

    def compute(self, unit: Unit) -> Callable[[dict[fx.Node, Any]], None]:
        return lambda values: self.float_lane.compute(unit.nodes, values)

    def _run_both(self, nodes: Sequence[fx.Node]) -> None:
        with quantized(self.gm, nodes, False, False):
            self.float_lane.run(nodes)
        if self.quant_lane is not None:
            with quantized(self.gm, nodes, *self.modes):
                self.quant_lane.run(nodes)


class _Lane(Lane):
    """A lane that runs several nodes batch by batch: only what outlives them is ever held for all batches."""

    @torch.no_grad()
    def run(self, nodes: Sequence[fx.Node]) -> None:
        for i, values in enumerate(self.values):
            for node in nodes:
                values[node] = self._run(node, i)
                for dead in self._dies_at.get(node, ()):
                    values.pop(dead, None)
            for node in nodes:
                if node in values:
                    values[node] = self.store.put(values[node])

    def compute(self, nodes: Sequence[fx.Node], values: dict[fx.Node, Any]) -> None:
        """The values of `nodes` from those of their inputs, with gradients."""
        for node in nodes:
            args, kwargs = self._arguments(node, values)
            values[node] = getattr(self._runner, node.op)(node.target, args, kwargs)


@contextmanager
def quantized(gm: fx.GraphModule, nodes: Sequence[fx.Node], w: bool, a: bool) -> Iterator[None]:
    """Inside the block, the modules of `nodes` compute quantized, or in float."""
    with ExitStack() as stack:
        for node in nodes:
            if node.op == "call_module":
                stack.enter_context(quant_mode(module_of(node, gm), w=w, a=a))
        yield


class Finished:
    """A folder with a file for each finished unit; a unit of another model or other data is refused."""

    def __init__(self, folder: Path):
        if folder.exists() and not folder.is_dir():
            raise ConfigError(f"checkpoint: {folder} is a file; name a folder")
        self.folder = folder

    def load(self, index: int, key: str, work: UnitLearning) -> tuple[float, float] | None:
        """Take over what a former run learned; None: it did not get that far."""
        from safetensors import safe_open

        path = self._path(index)
        if not path.is_file():
            return None
        with safe_open(str(path), framework="pt") as file:
            about = file.metadata() or {}
            if about.get("key") != key:
                raise CalibrationError(
                    f"checkpoint: {path} belongs to another model, other options or other calibration data "
                    f"than {work.unit.name}; remove the folder, or name another one"
                )
            state = State(work.modules)
            state.values = [file.get_tensor(str(i)) for i in range(len(state.places))]
        state.restore()
        return float(about["before"]), float(about["after"])

    def save(self, index: int, key: str, work: UnitLearning, errors: tuple[float, float]) -> None:
        from safetensors.torch import save

        self.folder.mkdir(parents=True, exist_ok=True)
        values = State(work.modules).values
        tensors = {str(i): v.cpu().contiguous() for i, v in enumerate(values)}
        about = {"key": key, "unit": work.unit.name, "before": repr(errors[0]), "after": repr(errors[1])}
        draft = self.folder / f".{index:04d}.{os.getpid()}"
        draft.write_bytes(save(tensors, about))
        os.replace(draft, self._path(index))

    def _path(self, index: int) -> Path:
        return self.folder / f"unit{index:04d}.safetensors"


def _fingerprint(unit: Unit, walk: _Walk) -> str:
    """A hash of the inputs of a unit's learning: options, bits, and float outputs, which depend on weights and data."""
    digest = hashlib.sha256(unit.name.encode())
    for layer in unit.layers:
        quantizer = weight_quantizer(layer)
        digest.update(f"{quantizer.spec} {quantizer.params.model_dump_json()}".encode())
    digest.update(repr((walk.modes, walk.quant_lane is not None)).encode())
    for targets in walk.samples.targets:
        for value in targets:
            total = walk.store.get(value).double()
            digest.update(repr([total.sum().item(), total.square().sum().item()]).encode())
    return digest.hexdigest()
