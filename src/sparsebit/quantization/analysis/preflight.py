"""Pre-flight: what will be quantized, with what, and what will not, before anything long is started."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from typing import Any

from torch import fx, nn

from sparsebit.export.backends import BACKENDS
from sparsebit.export.kernels.integer_kernels import OUTPUT
from sparsebit.quantization.analysis.costs import Measured, measure
from sparsebit.quantization.analysis.preflight_rows import PARTS, Row, RowBuilder
from sparsebit.quantization.analysis.speed import Prediction, predict, speed_line
from sparsebit.quantization.analysis.text import count, groups, labels, share, size, table
from sparsebit.quantization.layers import is_active, layers
from sparsebit.quantization.quantizers import Quantizer


@dataclass(frozen=True)
class Uncovered:
    """A parameter that no weight quantizer covers; biases and norms of one kind are one entry."""

    path: str
    shape: tuple[int, ...]
    bytes: int
    share: float  # of the bytes of all parameters
    tensors: int = 1


@dataclass(frozen=True, repr=False)
class Preflight:
    """The report. Print it, or take `as_dict()`."""

    model: str
    backend: str
    rows: list[Row]
    islands: list[dict[str, str]]  # path, error, line of the user's code
    uncovered: list[Uncovered]
    totals: dict[str, int]
    notes: list[str]
    config: str = ""  # what a mapping without BACKEND was put on
    speed: dict[str, Prediction] = field(default_factory=dict)  # by kind of CPU; onnxruntime only

    def as_dict(self) -> dict[str, Any]:
        """Everything as plain values, ready for JSON."""
        return asdict(self)

    def __str__(self) -> str:
        parts = (self._ops(), self._uncovered(), self._islands(), self.summary())
        return "\n\n".join(part for part in parts if part)

    __repr__ = __str__

    def short(self) -> str:
        """A screenful: islands, the reasons of ops that stay float or have no integer kernel, and the summary."""
        name = labels(self.rows)
        t = self.totals
        stays: dict[str, list[str]] = defaultdict(list)
        slow: dict[str, list[str]] = defaultdict(list)
        for row in self.rows:
            if row.state == "float":
                stays[row.how].append(name[row.name])
            elif row.macs and not row.integer and row.backend and BACKENDS[self.backend].INTEGER_OPS:
                slow[row.backend].append(name[row.name])
        lines = [f"stays float  {line}" for line in groups(stays)]
        if t.get("macs") and t["integer_macs"] < t["macs"]:
            lines += [f"not integer  {line}" for line in groups(slow)]
        return "\n\n".join(part for part in (self._islands(), "\n".join(lines), self.summary()) if part)

    def summary(self) -> str:
        """A few lines: the quantized share, the size, the share of integers, the memory of a calibration."""
        t = self.totals
        lines = [
            f"pre-flight of {self.model}, backend {self.backend}",
            *([f"config       {self.config}"] if self.config else []),
            f"ops          {t['quantized']} quantized, {t['absorbed']} absorbed, {t['float']} float",
            f"parameters   {size(t['bytes'])} -> {size(t['quantized_bytes'])}; "
            f"{share(t['covered_bytes'], t['bytes'])} of the bytes have a weight quantizer",
        ]
        if "macs" in t:
            ints = f", {share(t['integer_macs'], t['macs'])} in integers by {self.backend}"
            more = t["bytes_per_batch"]
            per_batch = ""
            if more:
                per_batch = f", and {size(more)} more with every batch"
            lines += [
                f"MACs         {count(t['macs'])}; {share(t['quantized_macs'], t['macs'])} quantized"
                + (ints if BACKENDS[self.backend].INTEGER_OPS else ""),
                f"calibration  about {size(t['calibration_bytes'])} beside the model, an estimate for this batch "
                f"size: activations {size(t['activation_bytes'])}, observers {size(t['observer_bytes'])}{per_batch}",
            ]
            if self.speed:
                lines.append(f"time         {speed_line(self.speed)}")
        else:
            lines.append("MACs         not counted: pass an example batch")
        return "\n".join([*lines, *(f"note         {note}" for note in self.notes)])

    def _ops(self) -> str:
        cells = []
        name = labels(self.rows)
        for r in self.rows:
            numbers = [count(r.macs) if r.macs else "", size(r.bytes) if r.bytes else ""]
            cells.append([name[r.name], r.op, f"{r.state}: {r.how}", *numbers, r.backend])
        return table(["name", "op", "state", "MACs", "parameters", self.backend], cells, "lllrrl")

    def _islands(self) -> str:
        cells = [[i["path"] or "(the model)", i["error"], i["line"]] for i in self.islands]
        head = "islands: not traced, run as they are\n"
        if cells:
            return head + table(["path", "error", "line"], cells)
        return ""

    def _uncovered(self) -> str:
        cells = []
        for u in self.uncovered:
            if u.tensors == 1:
                shape = "x".join(map(str, u.shape))
            else:
                shape = f"{u.tensors} tensors"
            cells.append([u.path, shape, size(u.bytes), f"{100 * u.share:.1f} %"])
        head = "parameters that no weight quantizer covers\n"
        if cells:
            return head + table(["path", "shape", "bytes", "share"], cells, "llrr")
        return ""


def preflight(qmodel: Any, example: Any = None, backend: str | None = None) -> Preflight:
    """The report on `qmodel`. With `example`, one batch in any form calibrate() takes, it also counts MACs and
    estimates the memory of a calibration; `backend` is the config's unless named."""
    gm: fx.GraphModule = qmodel.model
    backend = backend or str(qmodel.cfg.backend)
    measured = None if example is None else measure(qmodel, example)
    islands = gm.meta.get("islands", {})
    rows = [*RowBuilder(gm, qmodel.cfg, backend, measured).rows(), *_folded(gm)]
    return Preflight(
        model=type(gm).__name__,
        backend=backend,
        rows=rows,
        islands=[{"path": i.path, "error": i.error, "line": i.line} for i in islands.values()],
        uncovered=_uncovered(gm),
        totals=_totals(gm, rows, measured),
        notes=list(_notes(gm, backend, rows)),
        config=getattr(qmodel.cfg, "taken", ""),
        speed=_speed(gm, rows, measured, backend),
    )


def _speed(
    gm: fx.GraphModule, rows: list[Row], measured: Measured | None, backend: str
) -> dict[str, Prediction]:
    if measured is None or backend != "onnxruntime":
        return {}
    return {cpu: predict(gm, rows, measured, cpu) for cpu in ("vnni", "avx2")}


def _folded(gm: fx.GraphModule) -> list[Row]:
    """BatchNorms that are part of a convolution now."""
    names = (name for name, value in vars(gm).items() if isinstance(value, nn.Module))  # aliases of fuse_bn
    folded = gm.meta.get("folded") or {name: name.removesuffix("_bn") for name in names}
    paths = {n.name: str(n.meta.get("path") or n.name) for n in gm.graph.nodes}
    row = lambda path, to: Row(
        path.replace(".", "_"), path, "BatchNorm", "absorbed", f"into {paths.get(to, to)}"
    )
    return [row(path, to) for path, to in folded.items()]


def _covered(gm: fx.GraphModule) -> set[nn.Parameter]:
    return {layer.module.weight for layer in layers(gm) if is_active(layer.module.weight_quantizer)}


def _parameters(gm: fx.GraphModule) -> list[tuple[str, nn.Module, nn.Parameter]]:
    """(path, owner, parameter) of the network's own parameters, each once; not what quantizers learn."""
    found: dict[nn.Parameter, tuple[str, nn.Module]] = {}
    for prefix, owner in gm.named_modules():
        if not isinstance(owner, Quantizer):
            for name, p in owner.named_parameters(prefix, recurse=False):
                found.setdefault(p, (name, owner))
    return [(name, owner, p) for p, (name, owner) in found.items()]


def _uncovered(gm: fx.GraphModule) -> list[Uncovered]:
    everything = _parameters(gm)
    covered = _covered(gm)
    total = sum(p.nbytes for _, _, p in everything) or 1
    groups: dict[str, list[nn.Parameter]] = defaultdict(list)
    for path, owner, p in everything:
        if p not in covered:
            kind = type(owner).__name__.removeprefix("Q")
            small = p.dim() <= 1 or "Norm" in kind
            groups[f"*.{path.rpartition('.')[2]} of {kind}" if small else path].append(p)
    found = [
        Uncovered(path, tuple(ps[0].shape), n := sum(p.nbytes for p in ps), n / total, len(ps))
        for path, ps in groups.items()
    ]
    return sorted(found, key=lambda u: -u.bytes)


def _totals(gm: fx.GraphModule, rows: list[Row], measured: Measured | None) -> dict[str, int]:
    everything = _parameters(gm)
    covered = _covered(gm)
    states = ("quantized", "absorbed", "float", "island", PARTS)
    totals = {}
    for state in states:
        totals[state] = sum(r.state == state for r in rows)
    totals["bytes"] = sum(p.nbytes for _, _, p in everything)
    totals["covered_bytes"] = sum(p.nbytes for p in covered)
    totals["quantized_bytes"] = totals["bytes"] - sum(r.bytes - r.quantized_bytes for r in rows)
    if measured is None:
        return totals
    observers = sum(measured.state.values())
    return totals | {
        "macs": sum(measured.macs.values()),
        "quantized_macs": sum(measured.quantized.values()),
        "integer_macs": sum(r.macs for r in rows if r.integer),
        "activation_bytes": measured.peak,
        "observer_bytes": observers,
        "bytes_per_batch": measured.cached,
        "calibration_bytes": measured.peak + observers + measured.cached,
    }


def _notes(gm: fx.GraphModule, backend: str, rows: list[Row]) -> Iterator[str]:
    if "front_end" in gm.meta:  # auto_trace.py: which one was taken, and why
        yield gm.meta["front_end"]
    advice = BACKENDS[backend].ADVICE
    inputs = [q for layer in layers(gm) if (q := layer.module.input_quantizer) is not None and is_active(q)]
    if advice and any(q.is_symmetric for q in inputs):
        yield advice
    if any(r.backend == OUTPUT for r in rows) and any(r.how == "A.QADD.ENABLE_QUANT is off" for r in rows):
        yield (
            f"some layers stay float in {backend} only because an addition reads their output: "
            f"A.QADD.ENABLE_QUANT: true quantizes the inputs of additions"
        )
