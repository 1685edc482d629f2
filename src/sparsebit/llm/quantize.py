"""llm.quantize: the whole job, from float weights to a checkpoint on disk."""

from __future__ import annotations

import hashlib
import logging
import time
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from sparsebit.errors import CalibrationError, ConfigError
from sparsebit.graph.feeding import tracked
from sparsebit.llm.checkpoints.card import write_card
from sparsebit.llm.checkpoints.conserve import check_conserved
from sparsebit.llm.checkpoints.store import Store
from sparsebit.llm.checks.certificate import Certificate
from sparsebit.llm.checks.quality import measure, quality_of
from sparsebit.llm.methods import IGNORES_DATA, METHODS, NEEDS_DATA, PRUNES, check_options
from sparsebit.llm.models.experts import layer_sizes
from sparsebit.llm.models.sources import InMemory, open_source, tied_names
from sparsebit.llm.plan import Grids, format_for, left_float, matrices, reorders
from sparsebit.llm.readers import READERS
from sparsebit.llm.report import MUCH, Report, said_left, share_of
from sparsebit.llm.transforms.rotate import Rotated
from sparsebit.llm.walk.bit_budget import allocate
from sparsebit.llm.walk.block_walk import Job, walk
from sparsebit.llm.walk.data import Data, prepare
from sparsebit.llm.walk.relay import Ends, Relay
from sparsebit.llm.walk.sensitivity import sensitivities
from sparsebit.llm.walk.spill import spilling
from sparsebit.numeric.quantized_weight import WIDTHS

log = logging.getLogger("sparsebit")
ZERO_POINTS = 2  # bits up to which symmetric grids without signed scales lose everything


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
    """Quantizes the Linear layers of all decoder blocks and writes a checkpoint; `llm.load(save)` runs it.

    model       an nn.Module, or a folder with config.json and safetensors, which is read block by block.
    batches     token tensors (sequences, length), tuples, or dicts of arguments; "rtn" needs none.
    method      "gptq", "awq", "hqq", "rtn"; "smoothquant" (8-bit activations too); "sparsegpt" and "wanda" prune.
                What else it takes (clip, act_order, damping, refine, ratio, pattern, ...) goes into `options`.
    bits        of the codes; 4 where nothing is said.
    group_size  inputs that share a scale; -1: whole rows. None: the largest of 128, 64 and 32 that divides a layer's
                inputs.
    symmetric   grids without zero points. None: without, which is as good at 2 bits, because scales may be negative.
                With clip="minmax" they are not, so that 2 bits get zero points, unless that loses a reader.
    format      "compressed-tensors" (vLLM, transformers) or "gptq" (GPTQModel, vLLM, transformers); "int-quantized"
                for 8-bit activations, "dense" for pruned weights. None: what fits the method.
    candidate_bits, average_bits   a width per layer from these, so that the codes take `average_bits` on average.
    true_sequential  within a block, a layer sees what the quantized layers before it give.
    match_float      aim at the float model's outputs, not the float layer's on quantized inputs; twice the passes.
    rotate           turn the residual stream first, so that outliers are spread; the float outputs stay.
    towers      the lists of blocks that are quantized, by their names or parts of them ("encoder", "vision_tower"), or
                "all". None: both of an encoder-decoder; of a vision-language model the one that makes words.
    blocks      the path of the only ModuleList of blocks, where it is not found.
    spill       keep activations on disk meanwhile: in this folder, or for True in the system's temporary one.
    reader      the program that the checkpoint is for: "transformers", "vLLM" or "GPTQModel". The work does not begin
                where that program would not run it.
    force       begin all the same; `llm.load` runs everything that is written.

    The last sequences of `batches` (one of 16) are held back. On them the whole model is measured when it is done: see
    `Report.measured`. A run that was interrupted goes on when it is called again with the same arguments, and ends in
    the same bytes.
    """
    started = time.monotonic()
    METHODS[method], READERS[reader]  # unknown names are errors
    bits, group_size, format = _defaults(method, bits, group_size, format, candidate_bits)
    asked = {
        "method": method, "bits": bits, "group_size": group_size, "symmetric": symmetric, "format": format,
        "candidate_bits": list(candidate_bits or []), "average_bits": average_bits, "options": options,
        "true_sequential": true_sequential, "match_float": match_float,
    }  # fmt: skip
    asked |= {"rotate": True} if rotate else {}
    _check(method, bits, candidate_bits, average_bits, options)
    source = open_source(model, blocks, towers)
    data = _data(source, batches, method, mixed=bool(candidate_bits))
    source = Rotated(source) if rotate else source
    layout, dtype = format_for(source, format), _scale_dtype(source.model)
    job = Job(method, {}, options, layout, dtype, true_sequential, match_float)
    grids = Grids(bits, group_size, symmetric is not False, candidate_bits, force, reader)
    certificate = _certificate(source, job, grids, decide=symmetric is None)
    asked["symmetric"] = all(spec.symmetric for spec in job.specs.values())
    _warn_left(left_float(source, job.specs), certificate)
    certificate.sampled(None if data is None else [*data.fitted, *data.held])
    with spilling(spill) as folder:
        store = _work(source, data, job, (save, asked, folder, progress))
    _finish(source, job, store, certificate)
    return _report(source, job, store, certificate, time.monotonic() - started)


def _data(source: InMemory, batches: Any, method: str, mixed: bool) -> Data | None:
    """The calibration data, checked; None where there is none and none is needed."""
    reads = method not in IGNORES_DATA or mixed
    if batches is None:
        if method in NEEDS_DATA or mixed:
            raise CalibrationError(f"batches: {method} needs calibration data; 32 sequences are a good start")
        return None
    widest = max((inputs for _, inputs, _ in matrices(source).values()), default=0)
    return prepare(source.model, batches, widest, reads)


def _certificate(source: InMemory, job: Job, grids: Grids, decide: bool) -> Certificate:
    """Who will run it. 2 bits need zero points or signed scales; zero points where signs are not searched."""
    found = Certificate(source, job, grids)
    few = min(grids.candidates or (grids.bits,)) <= ZERO_POINTS and job.options.get("clip") == "minmax"
    if not decide or not few:
        return found
    specs = dict(job.specs)
    job.specs.clear()
    try:
        other = Certificate(source, job, replace(grids, symmetric=False))
    except ConfigError:
        other = None
    if other is not None and not [
        n for n, v in other.verdicts.items() if v.reason and not found.verdicts[n].reason
    ]:
        return other
    job.specs.clear()
    job.specs.update(specs)
    return found


def _warn_left(left: dict[str, int], certificate: Certificate) -> None:
    """Said before the long work: a large part of the blocks has no packed form that readers know."""
    share = share_of(left, sum(layer.outputs * layer.inputs for layer in certificate.plan.layers.values()))
    if share > MUCH:
        log.warning("%s: readers have no packed form of it", said_left(share, left))


def _work(source: InMemory, data: Data | None, job: Job, about: tuple[Any, ...]) -> Store:
    """Measures, chooses widths where that is asked for, walks through the blocks, and measures the whole model."""
    save, asked, spill, progress = about
    relay = _capture(source, data, job, (spill, progress))
    store = Store(save, {**asked, **_identity(source, relay)})
    if asked["candidate_bits"] and relay is not None:
        widths = tuple(asked["candidate_bits"])
        found = _Steps(sensitivities(source, relay, job, widths), len(job.specs))
        _choose_bits(tracked(found, progress, "measuring"), job, store, asked["average_bits"])
    ends = None if relay is None else Ends(relay)
    steps = _Steps(walk(source, relay, job, store, ends), len(source.layout))
    for i in tracked(steps, progress, "quantizing"):
        log.info("block %d of %d is stored", i + 1, len(source.layout))
    if ends is not None and data is not None:
        quality = measure(ends, data.apart)
        store.note("measured", None if quality is None else quality.facts())
    return store


def _capture(
    source: InMemory, data: Data | None, job: Job, about: tuple[Path | None, bool | None]
) -> Relay | None:
    """What enters the blocks, where there is data."""
    spill, progress = about
    if reorders(job) and not job.format.reorders:
        raise ConfigError(
            f"static_groups: {job.format.TYPE} has no groups in the order of the inputs' size; "
            "leave static_groups=True, or use format='gptq'"
        )
    if data is None:
        return None
    found = Relay(source, data, spill, progress)
    if isinstance(source, Rotated):
        source.prove(found.first, found.batches)
    return found


def _identity(source: InMemory, relay: Relay | None) -> dict[str, str]:
    """What must be the same for a run to be continued, beside its arguments."""
    return {
        "layout": str(source.layout),
        "inputs": _digest(relay.first.hidden if relay else []),
        "weights": _digest(source.first_rows()),
    }


def _report(source: InMemory, job: Job, store: Store, certificate: Certificate, seconds: float) -> Report:
    sizes = {
        source.layout.prefix(i) + name: size
        for i, block in enumerate(source.blocks)
        for name, size in layer_sizes(block, source.naming(i)).items()
        if source.layout.prefix(i) + name in store.state["layers"]
    }
    readers = certificate.rows(store.folder)
    store.note("readers", [row.facts() for row in readers])
    store.note("float_bytes", float_bytes(source))
    facts, left = store.state.get("measured"), left_float(source, job.specs)
    report = Report(
        store.folder, source.layout, job.method, store.state["layers"], sizes, seconds, tuple(readers), left,
        quality_of(facts) if facts else None, store.state["run"],
    )  # fmt: skip
    store.note("warning", report.warning)
    write_card(report, store.state["run"], certificate.plan.config)
    if report.warning:
        log.warning("%s", report.warning, extra={"at_end": True})
    certificate.check(report)
    return report


def _defaults(
    method: str, bits: int | None, group_size: int | None, format: str | None, candidates: Any
) -> tuple[int, int | None, str]:
    """What was not said; pruning keeps the dtype, so that there are neither bits nor groups."""
    if method in PRUNES:
        if bits is not None or group_size is not None or candidates or format not in (None, "dense"):
            raise ConfigError(
                f"{method}: prunes, and takes no bits, group_size, candidate_bits or other format than 'dense'; "
                "say ratio=0.5 or pattern=(2, 4)"
            )
        return 8, -1, "dense"
    if method == "smoothquant":
        return (
            8 if bits is None else bits,
            -1 if group_size is None else group_size,
            format or "int-quantized",
        )
    return 4 if bits is None else bits, group_size, format or "compressed-tensors"


def _check(
    method: str, bits: int, candidates: tuple[int, ...] | None, average: float | None, options: dict[str, Any]
) -> None:
    check_options(method, options)
    wrong = [b for b in (candidates or (bits,)) if b not in WIDTHS]
    if wrong:
        raise ConfigError(f"bits: must be among {', '.join(map(str, WIDTHS))}, got {wrong[0]}")
    if (candidates is None) != (average is None):
        raise ConfigError(
            "candidate_bits and average_bits go together: the widths to choose from, and their mean"
        )


def _choose_bits(sensitivity: Iterable[Any], job: Job, store: Store, average: float) -> None:
    """Fills in job.specs; the choice is noted in the store, because it takes a walk of its own."""
    if "chosen_bits" not in store.state:
        found = list(sensitivity)
        chosen = allocate([errors for _, _, errors in found], [size for _, size, _ in found], average)
        store.note("sensitivities", {name: errors for name, _, errors in found})
        store.note("chosen_bits", {name: b for (name, _, _), b in zip(found, chosen)})
    for name, b in store.state["chosen_bits"].items():
        job.specs[name] = job.specs[name].with_bits(b)


def _finish(source: InMemory, job: Job, store: Store, certificate: Certificate) -> None:
    layout, config = source.layout, certificate.final()
    rest = {**source.rest(), **source.extras()}
    written = [name for i in range(len(layout)) for name in store.names(i)] + list(rest)
    check_conserved(source, job.specs, job.format, written)
    store.finish(len(layout), rest, config, source.folder)


def float_bytes(source: InMemory) -> int:
    """The size of the model as it came; tied weights are there once."""
    model = getattr(source, "inner", source).model  # a rotated model has no tied weights
    tied = tied_names(model)
    return sum(t.numel() * t.element_size() for n, t in source.names.state.items() if n not in tied)


def _scale_dtype(model: nn.Module) -> torch.dtype:
    """Half precision: what kernels read, and what costs 16 bits per group."""
    kinds = {p.dtype for p in model.parameters()}
    return torch.bfloat16 if torch.bfloat16 in kinds else torch.float16


def _digest(tensors: Iterable[Tensor]) -> str:
    """A name for data, so that a run is not continued with other data."""
    found = hashlib.sha256()
    for tensor in tensors:
        found.update(tensor.detach().float().cpu().numpy().tobytes())
    return found.hexdigest()[:16]


class _Steps:
    """An iterator that knows its length, for the progress bar."""

    def __init__(self, steps: Any, length: int) -> None:
        self.steps, self.length = steps, length

    def __iter__(self) -> Any:
        return self.steps

    def __length_hint__(self) -> int:
        return self.length
