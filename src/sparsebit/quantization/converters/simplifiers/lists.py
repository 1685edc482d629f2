"""Legacy: the tasks of `simplify` by name, in the order they run. Append a name to add a task of your own.

What a task is: `converters/tasks.py`. QuantModel simplifies with the built-in tasks only: give it your own passes with
`QuantModel(model, config, passes=[...])`.
"""

from __future__ import annotations

from sparsebit.graph.simplify import SIMPLIFIERS

lists: list[str] = [step.name for step in SIMPLIFIERS]
