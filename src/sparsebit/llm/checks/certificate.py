"""The reader's certificate: who runs the checkpoint.

Before the long work every reader judges the plan. Afterwards those that are installed run the folder, in a process
without Sparsebit, and their logits are compared with those of `llm.load`.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from sparsebit.errors import ConfigError, ExportError, ReaderError
from sparsebit.graph.run.batches import first_of
from sparsebit.graph.run.calls import Call
from sparsebit.graph.run.signature import signature_of
from sparsebit.llm.checkpoints.load import load
from sparsebit.llm.checks.made_up import made_up
from sparsebit.llm.layers.linear import QuantLinear
from sparsebit.llm.models.experts import Expert, as_linear
from sparsebit.llm.models.sources import InMemory
from sparsebit.llm.plan import Grids, choices, is_transformers, mixed, plan_of
from sparsebit.llm.readers import READERS, Plan, Reader, Row, Verdict
from sparsebit.llm.report import Report
from sparsebit.llm.walk.job import Job

log = logging.getLogger("sparsebit")
# shares of the logits' size
EQUAL = 1e-4  # the order of sums differs
NEAR = 2e-2  # scales were rounded to half precision
TOKENS = 32  # that are tried
TEXT = {"input_ids", "attention_mask", "token_type_ids", "position_ids"}


class Certificate:
    """The certificate of one run. It asks the readers before the run, and runs the checkpoint after it."""

    def __init__(self, source: InMemory, job: Job, grids: Grids) -> None:
        """Fills in job.specs: the first choice that the reader runs. Where it runs none, no work begins."""
        self.source = source
        self.job = job
        self.force = grids.force
        self.inputs: dict[str, Tensor] = {}
        reader = READERS[grids.reader]()
        tried = []
        for specs in choices(source, job.format, grids):
            plan = plan_of(source, job, mixed(specs, grids.candidates) if grids.candidates else specs)
            verdicts = {}
            if is_transformers(source.model):
                verdicts = verdicts_on(plan)
            tried.append((specs, plan, verdicts))
            reason = refusal(reader, verdicts)
            if not reason:
                tried = tried[-1:]
                break
        if not specs:
            raise ConfigError(
                f"model: none of the {len(source.layout.names())} layers in its blocks has a name in checkpoints that "
                "readers know, so that nothing would be quantized; force=True (--force) packs them for llm.load"
            )
        if reason and not grids.force:  # the last choice is the best witness: readers could unpack it
            raise ConfigError(_refused(reader, reason, tried[-1][2]))
        specs, self.plan, self.verdicts = tried[0]
        job.specs.update(specs)

    def sampled(self, batches: Any) -> Any:
        """The batches; a few tokens of the first one are kept to be tried."""
        if not self.verdicts or batches is None:
            return batches
        first, rest = first_of(batches)
        self.inputs = {k: v.cpu().clone() for k, v in inputs_of(self.source.model, first).items()}
        if isinstance(batches, (Tensor, Mapping, Sequence)):
            return batches
        return rest

    def final(self) -> dict[str, Any]:
        """config.json, with the grids that were chosen and the words that readers want in it."""
        self.plan = plan_of(self.source, self.job, self.job.specs)
        settings = settings_of(self.verdicts)
        if settings and "quantization_config" in self.plan.config:
            self.plan = self.plan.with_settings(settings)
        return self.plan.config

    def rows(self, folder: Path) -> list[Row]:
        """One row per reader, when the folder is complete."""
        tables = {name: READERS[name]() for name in self.verdicts}
        for name, reader in tables.items():
            if reader.missing(self.plan) and len(self.plan.kinds) > 1:  # widths have been chosen since
                self.verdicts[name] = reader.judge(self.plan)
        return certify(folder, self.plan, self.verdicts, self.inputs)

    def check(self, report: Report) -> None:
        """An error where a reader should run the folder and does not; `force` makes a warning of it."""
        failed = [row for row in report.readers if row.state in ("failed", "untried")]
        for row in failed if self.force else ():
            log.warning("%s", row)
        if failed and not self.force:
            ways = "Try another format, or bits and group_size of your own"
            if all(row.state == "untried" for row in failed):
                ways = "Give batches (--data), of the processor of this model, to try it on"
            raise ReaderError(
                f"{report.folder}: {'; '.join(map(str, failed))}. The folder is kept, llm.load reads it, and its "
                f"README.md says who does not run it. {ways}; force=True (--force) accepts the folder. "
                "Please report it with the name of the model",
                report,
            )


def verdicts_on(plan: Plan) -> dict[str, Verdict]:
    """The answer of each reader."""
    return {reader.TYPE: reader().judge(plan) for reader in READERS.values() if plan.format in reader.formats}


def refusal(reader: Reader, verdicts: Mapping[str, Verdict]) -> str:
    """Why this reader would not run it; empty where it would, or cannot tell, and for models of the user's own."""
    if verdicts and reader.TYPE not in verdicts:
        return f"it reads only {', '.join(reader.formats)}"
    return verdicts[reader.TYPE].reason if verdicts else ""


def _refused(reader: Reader, reason: str, verdicts: Mapping[str, Verdict]) -> str:
    """The message in place of a run, with the remedy."""
    others = {name: verdict.reason for name, verdict in verdicts.items() if name != reader.TYPE}
    fit = [name for name, why in others.items() if not why]
    also = "; ".join(f"{name}: {why}" for name, why in others.items() if why)
    way = ""
    if fit:
        way = f"name a reader that does (reader= or --reader: {', '.join(fit)}), "
    return (
        f"reader: {' '.join([reader.TYPE, reader.version()]).strip()} would not run this checkpoint: {reason}"
        f"{f' ({also})' if also else ''}. Choose other options or another format, {way}"
        "or force=True (--force), which writes it for llm.load"
    )


def settings_of(verdicts: Mapping[str, Verdict]) -> dict[str, Any]:
    """Words that readers want in quantization_config."""
    found: dict[str, Any] = {}
    for verdict in verdicts.values():
        if not verdict.reason:
            for k, v in verdict.settings.items():
                found[k] = v
    return found


def certify(
    folder: Path, plan: Plan, verdicts: Mapping[str, Verdict], inputs: Mapping[str, Tensor]
) -> list[Row]:
    """One row per reader."""
    rows: list[Row] = []
    ours: _Ours | None = None
    for name, verdict in verdicts.items():
        reader = READERS[name]()
        if verdict.reason:
            rows.append(Row(name, "refused", f"refused: {verdict.reason}", reader.version()))
        elif verdict.unknown:
            rows.append(Row(name, "unknown", f"not run: {verdict.unknown}", reader.version()))
        elif reader.missing(plan):
            rows.append(Row(name, "fits", f"fits its rules ({reader.missing(plan)})", reader.version()))
        else:
            obstacle = _too_large(plan)
            if obstacle:
                rows.append(Row(name, "fits", f"names and shapes fit; not run: {obstacle}", reader.version()))
                continue
            ours = _Ours(folder, inputs) if ours is None else ours
            rows.append(_compared(reader, folder, ours))
    return rows


def inputs_of(model: Any, batch: Any) -> dict[str, Tensor]:
    """The input of the trial: a few tokens of the first batch. Other inputs cannot be cut safely, so the whole batch is
    taken."""
    args, kwargs = Call.of(batch, signature_of(model))
    given = {**signature_of(model).bind_partial(*args).arguments, **kwargs}
    found = {k: v for k, v in given.items() if isinstance(v, Tensor) and k != "labels"}
    if set(found) <= TEXT:
        result: dict[str, Tensor] = {}
        for k, v in found.items():
            result[k] = v[:1, :TOKENS] if v.dim() == 2 else v
        return result
    return found


def _compared(reader: Reader, folder: Path, ours: _Ours) -> Row:
    name = reader.TYPE
    version = reader.version()
    if not ours.inputs:
        return Row(name, "untried", "not run: the model takes none of the inputs that were made up", version)
    try:
        theirs = reader.logits(folder, ours.inputs)
    except ExportError as error:
        return Row(name, "failed", f"failed: {error}", version)
    if theirs.shape != ours.logits().shape or not bool(torch.isfinite(theirs).all()):
        return Row(name, "failed", f"failed: its logits are {tuple(theirs.shape)}, or not finite", version)
    gap = ours.gap(theirs)
    if gap > NEAR:
        return Row(name, "failed", f"failed: its logits differ from those of llm.load by {gap:.1%}", version)
    same = "equal" if gap <= EQUAL else f"within {gap:.2%}"
    left = ""
    if ours.left:
        left = f"; the inputs that were made up do not reach {ours.left}"
    return Row(name, "runs", f"runs, logits {same}{left}", version)


class _Ours:
    """The logits of `llm.load`.

    Readers that unpack a layer round its weights to the dtype of the scales. In a mixture of experts that may send a
    token to another expert, which is not a fault of theirs; so the same weights are rounded here, where it matters.
    """

    def __init__(self, folder: Path, inputs: Mapping[str, Tensor]) -> None:
        self.folder = folder
        self.inputs = inputs
        self.known: dict[str, Tensor] = {}
        self.left = ""  # the first packed layer that no input reaches
        if not inputs:
            model = load(folder, dtype=torch.float32)
            self.inputs, ran = made_up(model)
            always = (name for name in _packed(model) if not isinstance(_owner(model, name), Expert))
            self.left = next((name for name in always if name not in ran), "")
            _free(model)

    def gap(self, theirs: Tensor) -> float:
        """The difference as a share of the logits' size: the smallest of three ways to round."""
        best = float("inf")
        for rounded in ("", "experts", "all"):
            ours = self.logits(rounded)
            best = min(best, float((theirs - ours).norm() / ours.norm().clamp(min=1e-30)))
            if best <= NEAR:
                break
        return best

    @torch.no_grad()
    def logits(self, rounded: str = "") -> Tensor:
        """rounded: which packed layers get rounded weights: none, "experts" or "all"."""
        if rounded not in self.known:
            model = load(self.folder, dtype=torch.float32)
            if rounded:
                _round(model, experts_only=rounded == "experts")
            out = model(**self.inputs)
            found: Tensor = out.logits if hasattr(out, "logits") else out[0]
            self.known[rounded] = found.float()
            _free(model)
        return self.known[rounded]


def _free(model: nn.Module) -> None:
    """`save_pretrained` of a loaded model knows the model, and a cycle would not be freed at once."""
    vars(model).pop("save_pretrained", None)


def _packed(model: nn.Module) -> list[str]:
    return [name for name, layer in model.named_modules() if isinstance(layer, QuantLinear)]


def _owner(model: nn.Module, name: str) -> nn.Module:
    return model.get_submodule(name.rpartition(".")[0])


def _round(model: nn.Module, experts_only: bool) -> None:
    """Round the weights of float layers, in place, to the values that a packed layer has in the dtype of its scales."""
    for name in _packed(model):
        layer = model.get_submodule(name)
        parent = _owner(model, name)
        if isinstance(layer, QuantLinear) and (isinstance(parent, Expert) or not experts_only):
            weight = layer.dequantize(layer.scales.dtype).float()
            setattr(parent, name.rpartition(".")[2], as_linear(weight, layer.bias))


def _too_large(plan: Plan) -> str:
    """Why nothing is run: a model that is larger than the memory."""
    packed = sum(layer.outputs * layer.inputs for layer in plan.layers.values())
    floats = [shape for shape, kind in plan.tensors.values() if "float" in kind]
    needed = 4 * (packed + sum(torch.Size(shape).numel() for shape in floats))
    there = _free_memory()
    if there is not None and 1.5 * needed > there:
        return f"in float32 it takes {needed / 2**30:.1f} GB of memory, and {there / 2**30:.1f} GB are free"
    return ""


def _free_memory() -> int | None:
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable"))
    except (OSError, StopIteration):
        pass
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2
    except (ValueError, OSError, AttributeError):
        return None
