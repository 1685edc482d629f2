"""Best milliseconds of several files, in turns. Its own process, as run_file.py.

    python time_files.py BATCH TOOL=FILE ... [--runtime openvino] [--threads 1] [--seconds 8]

A turn is several runs: the first one pays for the caches of the session before it. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from real.feeds import Batch, load_batches
from real.run_file import RUNTIMES, Run  # puts SPARSEBIT_ORT_SITE first

RUNS = 3  # in one turn


def best_times(runs: dict[str, Run], batch: Batch, seconds: float) -> dict[str, float]:
    best = dict.fromkeys(runs, float("inf"))
    for run in runs.values():
        run(batch)
    rounds, end = 0, time.perf_counter() + seconds
    while rounds < 3 or time.perf_counter() < end:
        for tool, run in runs.items():
            for _ in range(RUNS):
                start = time.perf_counter()
                run(batch)
                best[tool] = min(best[tool], (time.perf_counter() - start) * 1000)
        rounds += 1
    return best


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("batch", type=Path)
    parser.add_argument("files", nargs="+", metavar="TOOL=FILE")
    parser.add_argument("--runtime", choices=list(RUNTIMES), default="onnxruntime")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=8.0)
    args = parser.parse_args()
    files = dict(pair.split("=", 1) for pair in args.files)
    runs = {tool: RUNTIMES[args.runtime](Path(file), args.threads) for tool, file in files.items()}
    print(json.dumps(best_times(runs, next(load_batches(args.batch)), args.seconds)))


if __name__ == "__main__":
    main()
