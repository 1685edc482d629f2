"""The facts as JSON, which has no infinity: it is written as text."""

from __future__ import annotations

import json
import math
from dataclasses import asdict
from typing import Any

from sparsebit.report.facts import Facts
from sparsebit.report.formats import FORMATS


@FORMATS.register("json")
def as_json(facts: Facts) -> str:
    return json.dumps(_plain(asdict(facts)), indent=1, ensure_ascii=False) + "\n"


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {k: _plain(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(v) for v in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value
