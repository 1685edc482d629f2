"""How much other programs work at the same time: they make every timing longer."""

from __future__ import annotations

import os
import time
from pathlib import Path

STAT = Path("/proc/stat")


class OtherWork:
    """Counts the work of other processes from its creation on, without this process and its ended children."""

    def __init__(self) -> None:
        self.clock = time.monotonic()
        self.all = _of_all()
        self.own = _of_this()

    def cores(self) -> float | None:
        """That other programs took, on average; None where the system does not say."""
        seconds = time.monotonic() - self.clock
        now = _of_all()
        if self.all is None or now is None or seconds <= 0:
            return None
        others = (now - self.all) - (_of_this() - self.own)
        return round(max(others, 0.0) / seconds, 2)


def _of_all() -> float | None:
    """Seconds that all cores have worked since the machine was started."""
    try:
        ticks = [int(word) for word in STAT.read_text("utf-8").splitlines()[0].split()[1:9]]
        return (sum(ticks) - ticks[3] - ticks[4]) / os.sysconf("SC_CLK_TCK")  # without idle and waiting
    except (OSError, ValueError, IndexError, AttributeError):
        return None


def _of_this() -> float:
    return sum(os.times()[:4])
