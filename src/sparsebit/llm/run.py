"""llm.quantize: the whole job, from float weights to a checkpoint on disk."""

from __future__ import annotations

import hashlib
import json
import logging
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from sparsebit.errors import CalibrationError, ConfigError
from sparsebit.graph.feeding import as_iterable, tracked
from sparsebit.llm.allocate import allocate
from sparsebit.llm.capture import Captured, capture
from sparsebit.llm.experts import layer_sizes
from sparsebit.llm.formats import FORMATS, spec_of
from sparsebit.llm.methods import IGNORES_DATA, METHODS, NEEDS_DATA, PRUNES, check_options
from sparsebit.llm.report import Report
from sparsebit.llm.rotate import Rotated
from sparsebit.llm.sensitivity import sensitivities
from sparsebit.llm.sources import InMemory, open_source
from sparsebit.llm.spill import spilling
from sparsebit.llm.store import Store
from sparsebit.llm.walk import Job, walk
from sparsebit.numeric.quantized_weight import WIDTHS

log = logging.getLogger("sparsebit")


def quantize(
    model: Any,
    batches: Any = None,
    *,
    save: str | Path,
    method: str = "gptq",
    bits: int | None = None,
    group_size: int | None = None,
    symmetric: bool = True,
    format: str | None = None,
    candidate_bits: tuple[int, ...] | None = None,
    average_bits: float | None = None,
    true_sequential: bool = True,
    match_float: bool = False,
    rotate: bool = False,
    blocks: str | None = None,
    spill: str | Path | bool = False,
    progress: bool | None = None,
    **options: Any,
) -> Report:
    """Quantizes the Linear layers of all decoder blocks and writes a checkpoint; `llm.load(save)` runs it.

    model       an nn.Module, or a folder with config.json and safetensors, which is read block by block.
    batches     token tensors (sequences, length), tuples, or dicts of arguments; "rtn" needs none.
    method      "gptq", "awq", "hqq", "rtn"; "smoothquant" (8-bit activations too); "sparsegpt" and "wanda" prune.
                What else it takes (clip, act_order, damping, refine, ratio, pattern, ...) goes into `options`.
    bits        of the codes; 4 where nothing is said, as with 128 for group_size.
    group_size  inputs that share a scale; -1: whole rows.
    format      "compressed-tensors" (vLLM, transformers) or "gptq" (GPTQModel, vLLM, transformers); "int-quantized"
                for 8-bit activations, "dense" for pruned weights. None: what fits the method.
    candidate_bits, average_bits   a width per layer from these, so that the codes take `average_bits` on average.
    true_sequential  within a block, a layer sees what the quantized layers before it give.
    match_float      aim at the float model's outputs, not the float layer's on quantized inputs; twice the passes.
    rotate           turn the residual stream first, so that outliers are spread; the float outputs stay.
    blocks      the path of the ModuleList of decoder blocks, where the largest is not it.
    spill       keep activations on disk meanwhile: in this folder, or for True in the system's temporary one.

    A run that was interrupted goes on when it is called again with the same arguments, and ends in the same bytes.
    """
    started = time.monotonic()
    METHODS[method]
    bits, group_size, format = _defaults(method, bits, group_size, format, candidate_bits)
    asked = {
        "method": method, "bits": bits, "group_size": group_size, "symmetric": symmetric, "format": format,
        "candidate_bits": list(candidate_bits or []), "average_bits": average_bits, "options": options,
        "true_sequential": true_sequential, "match_float": match_float,
    }  # fmt: skip
    asked |= {"rotate": True} if rotate else {}
    _check(method, bits, candidate_bits, average_bits, options)
    source = open_source(model, blocks)
    if rotate:
        batches = list(as_iterable(batches if batches is not None else []))
        source = Rotated(source)
    specs = {name: spec_of(bits, group_size, symmetric) for name in source.layout.names()}
    layout, dtype = FORMATS[format](), _scale_dtype(source.model)
    job = Job(method, specs, options, layout, dtype, true_sequential, match_float)
    with spilling(spill) as folder:
        store = _work(source, batches, job, (save, asked, folder, progress))
    _finish(source, job, store)
    return _report(source, job, store, time.monotonic() - started)


def _work(source: InMemory, batches: Any, job: Job, about: tuple[Any, ...]) -> Store:
    """Measures, chooses widths where that is asked for, and walks through the blocks."""
    save, asked, spill, progress = about
    captured = _capture(source, batches, job, bool(asked["candidate_bits"]), (spill, progress))
    store = Store(save, {**asked, **_identity(source, captured)})
    if asked["candidate_bits"] and captured is not None:
        widths = tuple(asked["candidate_bits"])
        found = _Steps(sensitivities(source, captured, job, widths), len(job.specs))
        _choose_bits(tracked(found, progress, "measuring"), job, store, asked["average_bits"])
    steps = _Steps(walk(source, captured, job, store), len(source.layout))
    for i in tracked(steps, progress, "quantizing"):
        log.info("block %d of %d is stored", i + 1, len(source.layout))
    return store


def _capture(
    source: InMemory, batches: Any, job: Job, mixed: bool, about: tuple[Path | None, bool | None]
) -> Captured | None:
    """What enters the blocks, where the method wants to know."""
    spill, progress = about
    if _reorders(job) and not job.format.reorders:
        raise ConfigError(
            f"static_groups: {job.format.TYPE} has no groups in the order of the inputs' size; "
            "leave static_groups=True, or use format='gptq'"
        )
    if batches is None:
        if job.method in NEEDS_DATA or mixed:
            raise CalibrationError(
                f"batches: {job.method} needs calibration data; 32 sequences are a good start"
            )
        return None
    unread = job.method in IGNORES_DATA and not mixed
    if isinstance(source, Rotated):
        used = tracked(batches[:1] if unread else batches, progress, "capturing")
        found = capture(source.model, source.blocks, used, source.inner.block(0), spill)
        source.prove(found, batches)
        return None if unread else found
    if unread:
        return None
    used = tracked(as_iterable(batches), progress, "capturing")
    return capture(source.model, source.blocks, used, source.block(0), spill)


def _identity(source: InMemory, captured: Captured | None) -> dict[str, str]:
    """What must be the same for a run to be continued, beside its arguments."""
    return {
        "layout": str(source.layout),
        "inputs": _digest(captured.hidden if captured else []),
        "weights": _digest(source.first_rows()),
    }


def _report(source: InMemory, job: Job, store: Store, seconds: float) -> Report:
    sizes = {
        source.layout.prefix(i) + name: size
        for i, block in enumerate(source.blocks)
        for name, size in layer_sizes(block).items()
    }
    return Report(store.folder, source.layout, job.method, store.state["layers"], sizes, seconds)


def _defaults(
    method: str, bits: int | None, group_size: int | None, format: str | None, candidates: Any
) -> tuple[int, int, str]:
    """What was not said; pruning keeps the dtype, so that there are neither bits nor groups."""
    if method in PRUNES:
        if bits is not None or group_size is not None or candidates or format not in (None, "dense"):
            raise ConfigError(
                f"{method}: prunes, and takes no bits, group_size, candidate_bits or other format than 'dense'; "
                "say ratio=0.5 or pattern=(2, 4)"
            )
        return 8, -1, "dense"
    usual = (8, -1, "int-quantized") if method == "smoothquant" else (4, 128, "compressed-tensors")
    return (
        usual[0] if bits is None else bits,
        usual[1] if group_size is None else group_size,
        format or usual[2],
    )


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


def _finish(source: InMemory, job: Job, store: Store) -> None:
    model, layout = source.model, source.layout
    inside = set(job.specs)
    ignored = [n for n, m in model.named_modules() if isinstance(m, nn.Linear) and n not in inside]
    own: Any = getattr(model, "config", None)
    config: dict[str, Any] = own.to_dict() if hasattr(own, "to_dict") else {}
    about = job.format.describe(job.specs, ignored, _reorders(job))
    if about:
        config["quantization_config"] = about
    config["sparsebit"] = {"blocks": layout.path, **({} if about else {"format": job.format.TYPE})}
    if layout.other and not job.format.plain:
        config["sparsebit"]["unfolded"] = True
    store.finish(len(layout), source.rest(), json.loads(json.dumps(config, default=str)), source.folder)


def _reorders(job: Job) -> bool:
    """Whether groups follow the order of the columns instead of being runs of inputs."""
    takes = {"act_order": True, "static_groups": True, **job.options}
    grouped = any(spec.group for spec in job.specs.values())
    return job.method == "gptq" and takes["act_order"] and not takes["static_groups"] and grouped


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
