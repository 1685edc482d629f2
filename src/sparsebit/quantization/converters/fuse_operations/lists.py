"""Legacy: the fuse tasks by name, in the order that `fuse_operations` runs them.

Append a name to add a task of your own: `lists.append("my_task")`. QuantModel runs the added tasks behind the built-in
ones. `SCHEDULE.MY_TASK: false` switches it off. What a task is: `converters/tasks.py`.
"""

from __future__ import annotations

from sparsebit.quantization.converters.fuse_operations.order import FUSE_PASSES

lists: list[str] = [step.name for step in FUSE_PASSES]
