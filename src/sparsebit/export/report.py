"""ExportReport: the written file, its checks, and the ops that run in integers."""

from __future__ import annotations

import json
import math
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch.utils import _pytree as pytree

from sparsebit.errors import ExportError
from sparsebit.export import files
from sparsebit.export.certificate.end_to_end import Comparison, EndToEnd
from sparsebit.export.certificate.timing import Timing

UNCALIBRATED = (
    "the model is not calibrated: every scale in the file is 1 (pact: its starting bound), so the outputs mean "
    "nothing; for a file to use, call qmodel.calibrate(batches) before export_onnx()"
)


class CertificateError(ExportError):
    """The file was written and run, and it differs from the model; `report` has the place."""

    def __init__(self, message: str, report: ExportReport):
        super().__init__(message)
        self.report = report


@dataclass
class ExportReport:
    path: str
    backend: str
    opset: int
    opset_reason: str
    bytes: int
    certificate: Comparison
    quantizers: dict[str, dict[str, str]] = field(default_factory=dict)  # by name: bits, scheme, module, kind
    integer: Counter[str] = field(default_factory=Counter)  # ops of the optimised graph
    floating: dict[str, int] = field(default_factory=dict)
    why_float: dict[str, str] = field(default_factory=dict)  # by module: why it has no integer kernel
    notes: list[str] = field(default_factory=list)
    pair_rule: str = ""  # whether the weights follow it, and its price
    others: dict[str, EndToEnd] = field(default_factory=dict)  # by runtime: the same comparison there
    timing: Timing | None = None  # with timing=True or tune=True
    uncalibrated: bool = False  # the model was not calibrated: the scales are 1

    @property
    def ok(self) -> bool:
        return not self.certificate.failures()

    def as_dict(self) -> dict[str, Any]:
        c = self.certificate
        return {
            "uncalibrated": self.uncalibrated,
            "path": self.path,
            "backend": self.backend,
            "opset": {"version": self.opset, "reason": self.opset_reason},
            "bytes": self.bytes,
            "ok": self.ok,
            "failures": c.failures(),
            **c.as_dict(),
            "other_runtimes": {name: run.as_dict() for name, run in self.others.items()},
            "integer_ops": dict(self.integer),
            "float_ops": self.floating,
            "why_float": self.why_float,
            "quantizers": self.quantizers,
            "pair_rule": self.pair_rule,
            "notes": self.notes,
            "timing": None if self.timing is None else self.timing.as_dict(self.why_float),
        }

    def summary(self) -> str:
        """The few figures that the file itself carries."""
        return _json({"uncalibrated": self.uncalibrated, "ok": self.ok, **self.certificate.as_dict()})

    def save(self, path: Path) -> None:
        path.write_text(_json(self.as_dict(), indent=1) + "\n", encoding="utf-8")

    def __str__(self) -> str:
        c = self.certificate
        kernels = (("integer kernels", _counts(self.integer)), ("float kernels", _counts(self.floating)))
        rows = [
            *([("WARNING", UNCALIBRATED)] if self.uncalibrated else []),
            ("certificate", "holds" if self.ok else "DOES NOT HOLD: " + "; ".join(c.failures()[:3])),
            ("file", f"{self.path}, {self.bytes / 1e6:.2f} MB, opset {self.opset} ({self.opset_reason})"),
            *c.rows(),
            (c.session, str(c.runtime)),
            *((f"in {name}", str(run)) for name, run in self.others.items()),
            ("noise floor", f"{c.floor} (input moved by 1e-5, the highest of {len(c.floors)})"),
            *(kernels if self.quantizers else ()),
            *((("pair rule", self.pair_rule),) if self.pair_rule else ()),
            *(("time", line) for line in ([] if self.timing is None else self.timing.lines(self.why_float))),
            *(("why float", f"{name}: {why}") for name, why in list(self.why_float.items())[:5]),
            *(("note", note) for note in self.notes),
        ]
        return "\n".join(f"{key:<16} {text}" for key, text in rows)

    __repr__ = __str__


def _counts(counts: Any) -> str:
    return ", ".join(f"{n} {op}" for op, n in sorted(counts.items())) or "none"


def _json(value: Any, indent: int | None = None) -> str:
    """JSON has no infinity: it is written as text."""
    plain = pytree.tree_map_only(float, lambda x: x if math.isfinite(x) else str(x), value)
    return json.dumps(plain, indent=indent, default=str, allow_nan=False)


def settle(report: ExportReport, draft: Path, path: Path) -> None:
    """Move a file that holds to its place. One that does not is kept apart, and the error names the start of the
    difference."""
    files.add_metadata(draft, "sparsebit.certificate", report.summary())
    report.path = str(path)
    report.bytes = files.size_of(draft)
    if report.ok:
        files.accept(draft, path)
        report.save(files.report_of(path))
        return
    failed = files.set_apart(draft, path)
    report.path = str(failed)
    report.save(files.report_of(failed))
    first = report.certificate.failures()[0]
    raise CertificateError(
        f"the file does not do what the model does; it starts at {first}\n  kept as {failed}", report
    )
