"""llm.quantize: the whole job, from float weights to a checkpoint on disk."""

from __future__ import annotations

import contextlib
import hashlib
import logging
import time
from collections.abc import Container, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from sparsebit.errors import CalibrationError, ConfigError
from sparsebit.llm.checkpoints.card import write_card
from sparsebit.llm.checkpoints.conserve import check_conserved
from sparsebit.llm.checkpoints.store import Store
from sparsebit.llm.checks.certificate import Certificate
from sparsebit.llm.checks.quality import measure, quality_of
from sparsebit.llm.methods import METHODS, Method
from sparsebit.llm.models.experts import layer_sizes
from sparsebit.llm.models.sources import InMemory, open_source, tied_names
from sparsebit.llm.plan import Grids, format_for, left_float, matrices, reorders
from sparsebit.llm.readers import READERS
from sparsebit.llm.report import MUCH, Report, left_text, share_of
from sparsebit.llm.transforms.rotate import Rotated
from sparsebit.llm.walk.bit_budget import allocate
from sparsebit.llm.walk.block_walk import walk
from sparsebit.llm.walk.data import Data, prepare
from sparsebit.llm.walk.job import Job
from sparsebit.llm.walk.relay import Ends, Relay
from sparsebit.llm.walk.sensitivity import sensitivities
from sparsebit.llm.walk.spill import spilling
from sparsebit.numeric.quantized_weight import WIDTHS
from sparsebit.utils.progress import tracked

log = logging.getLogger("sparsebit")
ZERO_POINTS = 2  # up to this number of bits, symmetric grids without signed scales lose everything


def quantize(
    model: Any,
    batches: Any = None,
    *,
    save: str | Path,
    method: str = "gptq",
    bits: int | None = None,
    group_size: int | None = None,
    symmetric: bool | None = None,
    format: str | None = None,
    candidate_bits: tuple[int, ...] | None = None,
    average_bits: float | None = None,
    true_sequential: bool = True,
    match_float: bool = False,
    rotate: bool = False,
    towers: str | Sequence[str] | None = None,
    blocks: str | None = None,
    spill: str | Path | bool = False,
    reader: str = "transformers",
    force: bool = False,
    progress: bool | None = None,
    **options: Any,
) -> Report:
    """Quantize the Linear layers of all decoder blocks, and write a checkpoint. `llm.load(save)` runs it.

    model       an nn.Module, or a folder with config.json and safetensors, which is read block by block.
    batches     token tensors (sequences, length), tuples, or dicts of arguments. "rtn" and "hqq" need none.
    method      "gptq", "awq", "hqq", "rtn"; "smoothquant" rounds activations to 8 bits too; "sparsegpt" and "wanda"
                prune. Options of the method (clip, act_order, damping, refine, ratio, pattern, ...) are passed as
                keywords too.
    bits        bits of the codes. None: the usual number for the method, mostly 4.
    group_size  how many inputs share a scale; -1: whole rows. None: the largest of 128, 64 and 32 that divides the
                inputs of a layer.
    symmetric   grids without zero points. None: without; that is as good at 2 bits, because scales may be negative.
                With clip="minmax" they are not negative. Then 2 bits get zero points, unless a reader cannot run them.
    format      "compressed-tensors" (vLLM, transformers) or "gptq" (GPTQModel, vLLM, transformers); "int-quantized"
                for 8-bit activations, "dense" for pruned weights. None: the one that fits the method.
    candidate_bits, average_bits   every layer gets one of these widths; the codes take `average_bits` on average.
    true_sequential  within a block, a layer sees the outputs of the quantized layers before it.
    match_float      aim at the outputs of the float model. Without it, the aim is the float layer on quantized
                     inputs. It takes twice the passes.
    rotate           rotate the residual stream first, so that outliers are spread. The float outputs stay.
    towers      the lists of blocks that are quantized, by their names or parts of them ("encoder", "vision_tower"), or
                "all". None: both of an encoder-decoder; of a vision-language model the one that makes words.
    blocks      the path of the only ModuleList of blocks, where it is not found.
    spill       keep activations on disk meanwhile: in this folder, or for True in the system's temporary one.
    reader      the program that the checkpoint is for: "transformers", "vLLM" or "GPTQModel". The work does not begin
                if that program would not run it.
    force       begin in spite of that; `llm.load` runs every checkpoint.

    One of 16 sequences of `batches`, the last ones, are not used for fitting. The whole model is measured on them at
    the end: see `Report.measured`. An interrupted run is resumed when it is called again with the same arguments, and
    ends in the same bytes.
    """
    started = time.monotonic()
    found = METHODS[method]  # an unknown name is an error
    READERS[reader]
    found.check(method, options)
    _check_widths(bits, candidate_bits, average_bits)
    if found.prunes:
        _refuse_widths(method, bits, group_size, format, candidate_bits)
    asked = {
        "method": method,
        **_asked(found, bits, group_size, format),
        "symmetric": symmetric,
        "candidate_bits": list(candidate_bits or []),
        "average_bits": average_bits,
        "options": options,
        "true_sequential": true_sequential,
        "match_float": match_float,
    }
    if rotate:
        asked["rotate"] = True
    source = open_source(model, blocks, towers)
    data = _data(source, batches, method, mixed=bool(candidate_bits))
    if rotate:
        source = Rotated(source)
    layout = format_for(source, asked["format"])
    job = Job(method, found, {}, options, layout, _scale_dtype(source.model), true_sequential, match_float)
    grids = Grids(asked["bits"], asked["group_size"], symmetric is not False, candidate_bits, force, reader)
    certificate = _certificate(source, job, grids, decide=symmetric is None)
    asked["symmetric"] = all(spec.symmetric for spec in job.specs.values())
    _warn_left(left_float(source, job.specs), certificate)
    certificate.sampled(None if data is None else [*data.fitted, *data.held])
    with spilling(spill) as folder:
        run = _Run(source, data, job, Path(save), asked, folder, progress)
        store = run.work()
    _finish(source, job, store, certificate)
    return _report(source, job, store, certificate, time.monotonic() - started)


def _asked(method: Method, bits: int | None, group_size: int | None, format: str | None) -> dict[str, Any]:
    """Widths, groups and format: those of the caller, or those that are usual for the method.

    A method that prunes keeps the dtype of the weights: its bits and groups have no meaning.
    """
    if method.prunes:
        return {"bits": 8, "group_size": -1, "format": "dense"}
    if method.activations and format not in (None, method.format):
        raise ConfigError(
            f"format: {format} has no place for 8-bit activations, which {method.solve.__name__} is for; "
            f"leave it out, or give {method.format}"
        )
    if bits is None:
        bits = method.bits
    if group_size is None:
        group_size = method.group_size
    return {"bits": bits, "group_size": group_size, "format": format or method.format}


def _check_widths(bits: int | None, candidates: tuple[int, ...] | None, average: float | None) -> None:
    widths: tuple[int, ...] = candidates or ()
    if bits is not None and not candidates:
        widths = (bits,)
    for width in widths:
        if width not in WIDTHS:
            raise ConfigError(f"bits: must be among {', '.join(map(str, WIDTHS))}, got {width}")
    if (candidates is None) != (average is None):
        raise ConfigError(
            "candidate_bits and average_bits need each other: the widths to choose from, and their mean"
        )
    if candidates and average is not None and not min(candidates) <= average <= max(candidates):
        choices = ", ".join(map(str, candidates))
        raise ConfigError(
            f"average_bits: must lie between the widths to choose from ({choices}), got {average}"
        )


def _refuse_widths(
    method: str,
    bits: int | None,
    group_size: int | None,
    format: str | None,
    candidates: tuple[int, ...] | None,
) -> None:
    """Pruning keeps the dtype of the weights, so there are neither bits nor groups."""
    if bits is not None or group_size is not None or candidates or format not in (None, "dense"):
        raise ConfigError(
            f"{method}: prunes, and takes no bits, group_size, candidate_bits or other format than 'dense'; "
            "say ratio=0.5 or pattern=(2, 4)"
        )


def _data(source: InMemory, batches: Any, method: str, mixed: bool) -> Data | None:
    """The calibration data, checked; None where there is none and none is needed."""
    if batches is None:
        if METHODS[method].needs_data or mixed:
            raise CalibrationError(f"batches: {method} needs calibration data; 32 sequences are a good start")
        return None
    widest = max((inputs for _, inputs, _ in matrices(source).values()), default=0)
    return prepare(source.model, batches, widest, METHODS[method].uses_data or mixed)


def _certificate(source: InMemory, job: Job, grids: Grids, decide: bool) -> Certificate:
    """Which programs will run the checkpoint.

    decide  choose between grids with and without zero points: 2 bits need zero points where scales have no signs.
    """
    found = Certificate(source, job, grids)
    widths = grids.candidates or (grids.bits,)
    if not decide or min(widths) > ZERO_POINTS or job.options.get("clip") != "minmax":
        return found
    specs = dict(job.specs)
    job.specs.clear()
    other = None
    with contextlib.suppress(ConfigError):  # this format or reader has no zero points
        other = Certificate(source, job, replace(grids, symmetric=False))
    if other is not None and not _loses_a_reader(other, found):
        return other
    job.specs.clear()
    job.specs.update(specs)
    return found


def _loses_a_reader(new: Certificate, old: Certificate) -> bool:
    """True if a reader that runs the `old` plan refuses the `new` one."""
    return any(verdict.reason and not old.verdicts[name].reason for name, verdict in new.verdicts.items())


def _warn_left(left: dict[str, int], certificate: Certificate) -> None:
    """Warn before the long work if a large part of the blocks has no packed form that readers know."""
    quantized = sum(layer.outputs * layer.inputs for layer in certificate.plan.layers.values())
    share = share_of(left, quantized)
    if share > MUCH:
        log.warning("%s: readers have no packed form of it", left_text(share, left))


@dataclass(frozen=True)
class _Run:
    """One run: its layers, its method, and its files."""

    source: InMemory
    data: Data | None
    job: Job
    save: Path
    asked: dict[str, Any]  # it is stored, and must be the same when the run is continued
    spill: Path | None
    progress: bool | None

    def work(self) -> Store:
        """Choose widths where that is asked for, walk through the blocks, and measure the whole model."""
        relay = self._relay()
        store = Store(self.save, {**self.asked, **_identity(self.source, relay)})
        if self.asked["candidate_bits"] and relay is not None:
            self._choose_bits(relay, store)
        ends = None
        if relay is not None:
            ends = Ends(relay)
        steps = _Steps(walk(self.source, relay, self.job, store, ends), len(self.source.layout))
        for i in tracked(steps, self.progress, "quantizing"):
            log.info("block %d of %d is stored", i + 1, len(self.source.layout))
        if ends is not None and self.data is not None:
            quality = measure(ends, self.data.apart)
            facts = None
            if quality is not None:
                facts = quality.facts()
            store.note("measured", facts)
        return store

    def _relay(self) -> Relay | None:
        """The inputs of the blocks, where there is data."""
        layout = self.job.format
        if reorders(self.job) and not layout.reorders:
            raise ConfigError(
                f"static_groups: {layout.TYPE} has no groups in the order of the inputs' size; "
                "leave static_groups=True, or use format='gptq'"
            )
        if self.data is None:
            return None
        found = Relay(self.source, self.data, self.spill, self.progress)
        if isinstance(self.source, Rotated):
            self.source.prove(found.first, found.batches)
        return found

    def _choose_bits(self, relay: Relay, store: Store) -> None:
        """Set the width of every layer in job.specs. The choice is stored, because it takes a walk of the model."""
        if "chosen_bits" not in store.state:
            widths = tuple(self.asked["candidate_bits"])
            steps = _Steps(sensitivities(self.source, relay, self.job, widths), len(self.job.specs))
            names = []
            sizes = []
            errors = []
            for name, size, error in tracked(steps, self.progress, "measuring"):
                names.append(name)
                sizes.append(size)
                errors.append(error)
            chosen = allocate(errors, sizes, self.asked["average_bits"])
            store.note("sensitivities", dict(zip(names, errors)))
            store.note("chosen_bits", dict(zip(names, chosen)))
        for name, bits in store.state["chosen_bits"].items():
            self.job.specs[name] = self.job.specs[name].with_bits(bits)


def _identity(source: InMemory, relay: Relay | None) -> dict[str, str]:
    """The facts that must be equal to resume a run, beside its arguments."""
    inputs: Iterable[Tensor] = []
    if relay is not None:
        inputs = relay.first.hidden
    return {
        "layout": str(source.layout),
        "inputs": _digest(inputs),
        "weights": _digest(source.first_rows()),
    }


def _report(source: InMemory, job: Job, store: Store, certificate: Certificate, seconds: float) -> Report:
    readers = certificate.rows(store.folder)
    store.note("readers", [row.facts() for row in readers])
    store.note("float_bytes", float_bytes(source))
    measured = None
    if store.state.get("measured"):
        measured = quality_of(store.state["measured"])
    report = Report(
        folder=store.folder,
        layout=source.layout,
        method=job.name,
        layers=store.state["layers"],
        sizes=_sizes(source, store.state["layers"]),
        seconds=seconds,
        readers=tuple(readers),
        left=left_float(source, job.specs),
        measured=measured,
        run=store.state["run"],
    )
    store.note("warning", report.warning)
    write_card(report, store.state["run"], certificate.plan.config)
    if report.warning:
        log.warning("%s", report.warning, extra={"at_end": True})
    certificate.check(report)
    return report


def _sizes(source: InMemory, layers: Container[str]) -> dict[str, int]:
    """The number of weights of each of `layers`."""
    found = {}
    for i, block in enumerate(source.blocks):
        for name, size in layer_sizes(block, source.naming(i)).items():
            full_name = source.layout.prefix(i) + name
            if full_name in layers:
                found[full_name] = size
    return found


def _finish(source: InMemory, job: Job, store: Store, certificate: Certificate) -> None:
    """Write what does not belong to a block, after a check that no tensor of the source is lost."""
    blocks = len(source.layout)
    config = certificate.final()
    rest = {**source.rest(), **source.extras()}
    written = list(rest)
    for i in range(blocks):
        written += store.names(i)
    check_conserved(source, job.specs, job.format, written)
    store.finish(blocks, rest, config, source.folder)


def float_bytes(source: InMemory) -> int:
    """The size of the float model; tied weights count once."""
    # of the source before rotation: a rotated model has no tied weights
    model = getattr(source, "inner", source).model
    tied = tied_names(model)
    return sum(t.numel() * t.element_size() for n, t in source.names.state.items() if n not in tied)


def _scale_dtype(model: nn.Module) -> torch.dtype:
    """Half precision: kernels read it, and it costs 16 bits per group."""
    kinds = {parameter.dtype for parameter in model.parameters()}
    if torch.bfloat16 in kinds:
        return torch.bfloat16
    return torch.float16


def _digest(tensors: Iterable[Tensor]) -> str:
    """A name for data, so that a run is not continued with other data."""
    found = hashlib.sha256()
    for tensor in tensors:
        found.update(tensor.detach().float().cpu().numpy().tobytes())
    return found.hexdigest()[:16]


class _Steps:
    """An iterator that knows its length, for the progress bar."""

    def __init__(self, steps: Any, length: int) -> None:
        self.steps = steps
        self.length = length

    def __iter__(self) -> Any:
        return self.steps

    def __length_hint__(self) -> int:
        return self.length
