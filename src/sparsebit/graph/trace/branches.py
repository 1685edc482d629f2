"""Branches in the user's code: their line, their outcome, and whether their condition lasts.

A check that only raises has one outcome, which is read from the bytecode.
"""

from __future__ import annotations

import dis
import linecache
import sys
from pathlib import Path
from types import FrameType
from typing import Any

from torch import fx

from sparsebit.graph.islands import OWN


def only_outcome() -> bool | None:
    """The truth value that continues, if the other branch of the user's code only raises; None if both
    continue.

    `assert x.dim() == 4`, `if x.shape[1] != n: raise ValueError(...)`
    """
    frame = users_frame()
    return None if frame is None else _decide(frame)


def users_frame() -> FrameType | None:
    """The frame of the user's code that is running."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename.startswith(OWN):
        frame = frame.f_back
    return frame


LASTING = frozenset(("shape", "size", "dim", "ndim", "numel", "dtype", "is_floating_point", "is_complex"))
OF_THE_MOMENT = frozenset(
    ("requires_grad", "is_leaf", "grad_fn", "is_contiguous", "stride", "device", "is_cuda", "get_device")
)


def of_the_moment(node: fx.Node) -> bool:
    """Does a condition read a property that may change between runs of the same sizes: gradients, strides, a
    device?"""
    seen = {node}
    waiting = [node]
    while waiting:
        node = waiting.pop()
        if node.target is getattr:
            asked: Any = node.args[1]
        else:
            asked = node.target
        if asked in OF_THE_MOMENT:
            return True
        if asked not in LASTING:
            waiting += [source for source in node.all_input_nodes if source not in seen]
            seen.update(waiting)
    return False


def line_of_caller() -> str:
    """`model.py:12: if x.shape[1] > 4:`"""
    frame = users_frame()
    if frame is None:
        return "the forward"
    file = frame.f_code.co_filename
    line = frame.f_lineno
    return f"{Path(file).name}:{line}: {linecache.getline(file, line).strip()}"


def _decide(frame: FrameType) -> bool | None:
    code = list(dis.get_instructions(frame.f_code))
    at = {instruction.offset: i for i, instruction in enumerate(code)}
    i = at.get(frame.f_lasti)
    if i is None:
        return None
    # since Python 3.13 a comparison may end in a truth value by itself
    if code[i].opname == "TO_BOOL" or code[i].argrepr.startswith("bool("):
        i += 1
    jump = code[i].opname
    if not (jump.startswith("POP_JUMP") and jump.endswith(("IF_TRUE", "IF_FALSE"))):
        return None
    jumps_on = jump.endswith("IF_TRUE")
    target = _raises(code, at[code[i].argval])
    following = _raises(code, i + 1)
    if target == following:
        return None
    return not jumps_on if target else jumps_on


def _raises(code: list[dis.Instruction], i: int) -> bool:
    """Does every instruction from here on lead to a `raise`?"""
    for instruction in code[i:]:
        if instruction.opname == "RAISE_VARARGS":
            return True
        if "JUMP" in instruction.opname or instruction.opname.startswith(
            ("RETURN", "STORE", "YIELD", "FOR_")
        ):
            return False
    return False
