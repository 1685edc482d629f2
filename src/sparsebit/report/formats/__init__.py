"""One file is one format: a function from Facts to text, registered under its name."""

from __future__ import annotations

from collections.abc import Callable

from sparsebit.registry import Registry
from sparsebit.report.facts import Facts

FORMATS: Registry[Callable[[Facts], str]] = Registry("report format")
