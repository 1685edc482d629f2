"""A file that is slower than the float one: why, and the option that helps."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

log = logging.getLogger("sparsebit")
SLOWER = 1.05  # times: less is the noise of a machine
SMALL = 0.5  # ms: of a float model this fast, starting kernels is most of the time
FLOAT_KERNELS = 0.5  # the share of MACs in integers below which float kernels are to blame


def warn_if_slower(run: Any) -> None:
    """After the step `latency`."""
    if not run.done("latency"):
        return
    times = run.about["steps"]["latency"]["milliseconds"]
    ratio = times["new"] / times["float"]
    if ratio < SLOWER:
        return
    if run.command == "prune":
        reason = _of_pruned(run)
    else:
        reason = _of_quantized(run, times["float"])
    log.warning("the new file is slower than the float one, %.2f x its time: %s", ratio, reason)


def _of_pruned(run: Any) -> str:
    rounded = int(run.about["settings"].get("round_to", 1))
    if rounded % 8:  # 0 is 8 where that is possible
        return f"kernels want multiples of 8 channels, and --round-to is {rounded}: try --round-to 8"
    return "fewer channels do not always mean less time: --latency 0.7 measures layers here and aims at time itself"


def _of_quantized(run: Any, float_ms: float) -> str:
    config = run.about["settings"]["config"]
    layers = _read(run.folder / "layers.json")
    totals = layers.get("totals", {})
    w = config["W"]
    a = config["A"]
    if config["BACKEND"] != "onnxruntime":
        return f"the config is for {config['BACKEND']}, and onnxruntime was timed: --preset w8a8 is for onnxruntime"
    if a["QUANTIZER"]["DISABLE"]:
        return (
            "activations stay float, so nothing is computed in integers (the file is smaller): --preset w8a8"
        )
    if min(w["QUANTIZER"]["BIT"], a["QUANTIZER"]["BIT"]) < 8:
        return "onnxruntime has integer kernels for 8 bits, fewer are computed in float: --preset w8a8"
    if a["QSCHEME"].endswith("symmetric"):
        return "its kernels for x86 want affine activations: --set A.QSCHEME=per-tensor-affine"
    if layers.get("islands") and run.about["settings"]["trace"] == "fx":
        return "some parts could not be traced, and stay float inside: --trace export may see inside them"
    if not a["QADD"]["ENABLE_QUANT"] and any(r["op"] == "Add" for r in layers.get("rows", ())):
        return "additions stay float, and so do the layers in front of them: --set A.QADD.ENABLE_QUANT=true"
    integer = totals.get("integer_macs", 0) / max(totals.get("macs", 0), 1)
    if integer < FLOAT_KERNELS:
        return f"only {100 * integer:.0f} % of the MACs run in integers; `sparsebit check --verbose` says why, op by op"
    if float_ms < SMALL:
        return (
            f"a model of {float_ms:.2g} ms is too small to gain: try larger batches, or keep the float file"
        )
    return "this processor may lack int8 instructions (VNNI); --preset w8 keeps the small size and float arithmetic"


def _read(path: Path) -> dict[str, Any]:
    try:
        found: dict[str, Any] = json.loads(path.read_text("utf-8"))
    except (OSError, ValueError):
        return {}
    return found
