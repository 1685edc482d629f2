"""ExportReport: what was written, how it was checked, and what runs in integers."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sparsebit.export.certify import Certificate, EndToEnd


@dataclass
class ExportReport:
    path: str
    backend: str
    opset: int
    opset_reason: str
    bytes: int
    certificate: Certificate
    quantizers: dict[str, dict[str, str]] = field(default_factory=dict)  # by name: bits, scheme, module, kind
    integer: Counter[str] = field(default_factory=Counter)  # ops of the optimised graph
    floating: dict[str, int] = field(default_factory=dict)
    why_float: dict[str, str] = field(default_factory=dict)  # by module: why it has no integer kernel
    notes: list[str] = field(default_factory=list)
    others: dict[str, EndToEnd] = field(default_factory=dict)  # by runtime: the same comparison there

    @property
    def ok(self) -> bool:
        return not self.certificate.failures()

    def as_dict(self) -> dict[str, Any]:
        c = self.certificate
        return {
            "path": self.path,
            "backend": self.backend,
            "opset": {"version": self.opset, "reason": self.opset_reason},
            "bytes": self.bytes,
            "ok": self.ok,
            "failures": c.failures(),
            "local": {
                "quantizers": len(c.quantizers),
                "codes": c.codes,
                "wrong": sum(q.wrong for q in c.quantizers.values()),
                "at_boundary": c.at_boundary,
                "output_error": c.output_error,
            },
            "end_to_end": c.runtime.as_dict(),
            "noise_floor": c.floor.as_dict(),
            "other_runtimes": {name: run.as_dict() for name, run in self.others.items()},
            "integer_ops": dict(self.integer),
            "float_ops": self.floating,
            "why_float": self.why_float,
            "quantizers": self.quantizers,
            "notes": self.notes,
        }

    def summary(self) -> str:
        """The few figures that the file itself carries."""
        known = self.as_dict()
        return json.dumps(
            {key: known[key] for key in ("ok", "local", "end_to_end", "noise_floor")}, default=str
        )

    def save(self, path: Path) -> None:
        path.write_text(json.dumps(self.as_dict(), indent=1, default=str) + "\n", encoding="utf-8")

    def __str__(self) -> str:
        c = self.certificate
        wrong = sum(q.wrong for q in c.quantizers.values())
        rows = [
            ("file", f"{self.path}, {self.bytes / 1e6:.2f} MB, opset {self.opset} ({self.opset_reason})"),
            ("certificate", "holds" if self.ok else "DOES NOT HOLD: " + "; ".join(c.failures()[:3])),
            ("each quantizer", f"{len(c.quantizers)} checked, {wrong} of {c.codes} codes wrong"),
            ("float rounding", f"{c.at_boundary} codes on a boundary, outputs within {c.output_error:.1e}"),
            ("as users run it", _end_to_end(c.runtime)),
            *((f"in {name}", _end_to_end(run)) for name, run in self.others.items()),
            ("noise floor", f"{_end_to_end(c.floor)} (input moved by 1e-5)"),
            ("integer kernels", _counts(self.integer)),
            ("float kernels", _counts(self.floating)),
            *(("why float", f"{name}: {why}") for name, why in list(self.why_float.items())[:5]),
            *(("note", note) for note in self.notes),
        ]
        return "\n".join(f"{key:<16} {text}" for key, text in rows)

    __repr__ = __str__


def _end_to_end(run: Any) -> str:
    labels = f", {run.labels_differ} of {run.labels} labels differ" if run.labels else ""
    return f"{run.noise_db:.1f} dB, largest difference {run.largest:.2g}{labels}"


def _counts(counts: Any) -> str:
    return ", ".join(f"{n} {op}" for op, n in sorted(counts.items())) or "none"
