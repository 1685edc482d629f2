"""Our int8 file beside the float file and beside the one of onnxruntime's own `quantize_static`, over a zoo.

    python benchmarks/zoo_speed.py [--models resnet18 yolo ...] [--batches 1 8] [--save speed.json]
    python benchmarks/zoo_speed.py --work build/zoo_speed --step write      # the files; may run beside other work
    python benchmarks/zoo_speed.py --work build/zoo_speed --step time       # their times; alone on the machine
    PYTHONPATH=build/ort_avx2 python ... --step time --where avx2           # of another onnxruntime (without_vnni.py)
    python benchmarks/zoo_speed.py --work build/zoo_speed --step table      # into docs/benchmarks.md

With `--work` the files are kept, and a model that has its files is not written again. One process per model.
`quantize_static` gets the float file after `quant_pre_process`, the same calibration data, QDQ, uint8 activations and
int8 weights per channel. The three files are timed in turns, on all cores, in plain sessions; the best round of each
counts. `--threads 1` takes one core, because a virtual machine may share the second one with others. Weights are
random: the figures are times, not accuracies.

Bars: no model slower than 1.05 x the faster of the two others; over the CNNs the geometric mean at most 0.95 of
quantize_static and at most 0.6 of float; every certificate holds.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import logging
import math
import platform
import subprocess
import sys
import tempfile
import time
import warnings
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent / "tests" / "zoo")]

import zoo_speed_models

SLOWEST, CNN_PEER, CNN_FLOAT = 1.05, 0.95, 0.6
CALIBRATION = 8  # samples
RUNS = 5  # of a session in its turn


def write(name: str, place: Path) -> dict[str, Any]:
    """One model: its three files, and what runs in integers in ours."""
    import torch

    import sparsebit
    from sparsebit.export.certificate.runtime import kernels

    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    torch.manual_seed(0)
    case = zoo_speed_models.case(name)
    model, data = case.model(), case.data(CALIBRATION)
    files = files_in(place)
    write_float(model, data, files["float"], case.free_batch)
    failed = write_peer(files["float"], data, files["peer"])
    if failed:
        files.pop("peer").unlink(missing_ok=True)
    started = time.monotonic()
    qmodel = sparsebit.quantize(model, data, progress=False)
    axes = {name: {0: "batch"} for name in names_of(data[0])} if case.free_batch else None
    with contextlib.redirect_stdout(io.StringIO()):
        report = qmodel.export_onnx(
            data[0], str(files["ours"]), list(names_of(data[0])), dynamic_axes=axes, batches=data[1:2]
        )
    took = time.monotonic() - started
    integer, floating = kernels(files["ours"])
    return {
        "model": name,
        "cnn": case.cnn,
        "free_batch": case.free_batch,
        "ok": report.ok,
        "peer_failed": failed,
        "integer": dict(integer),
        "float": dict(floating),
        "why_float": report.why_float,
        **announced(qmodel, data[0]),
        "seconds": took,
        "bytes": {kind: file.stat().st_size for kind, file in files.items()},
    }


def announced(qmodel: Any, batch: Any) -> dict[str, Any]:
    """What the pre-flight report says: the share of MACs in integers, and the time by that of float."""
    found = qmodel.preflight(batch)
    share = found.totals["integer_macs"] / max(found.totals["macs"], 1)
    return {"integer_share": share, "predicted": {cpu: speed.ratio for cpu, speed in found.speed.items()}}


def timed(row: dict[str, Any], place: Path, args: argparse.Namespace) -> dict[str, Any]:
    """The row with the times of the files."""
    import torch

    torch.manual_seed(0)
    data = zoo_speed_models.case(row["model"]).data(CALIBRATION)
    files = {kind: file for kind, file in files_in(place).items() if file.exists()}
    sizes = args.batches if row["free_batch"] else [1]
    times = {f"ms_{size}": best_times(files, fed(data, size), args.seconds, args.threads) for size in sizes}
    return {**row, **times}


def files_in(place: Path) -> dict[str, Path]:
    return {kind: place / f"{kind}.onnx" for kind in ("float", "peer", "ours")}


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """The step that was asked for, of one model."""
    with tempfile.TemporaryDirectory() as temporary:
        place = args.work / args.one if args.work else Path(temporary)
        place.mkdir(parents=True, exist_ok=True)
        kept = place / "row.json"
        if not kept.exists():
            if args.step == "time":
                raise SystemExit(f"{args.one}: --step write comes first")
            kept.write_text(json.dumps(write(args.one, place)))
        row: dict[str, Any] = json.loads(kept.read_text())
        if args.step == "write":
            return row
        found = timed(row, place, args)
        now = {key: times for key, times in found.items() if key.startswith("ms_")}
        row.setdefault("times", {}).setdefault(args.where, {}).update(now)
        kept.write_text(json.dumps(row))
        return found


def names_of(batch: Any) -> dict[str, Any]:
    """Inputs by name."""
    return dict(batch) if isinstance(batch, dict) else {"x": batch}


def fed(data: list[Any], size: int) -> dict[str, Any]:
    import torch

    first = names_of(data[0])
    whole = {key: torch.cat([names_of(batch)[key] for batch in data]) for key in first}
    return {
        key: value.repeat(-(-size // len(value)), *[1] * (value.dim() - 1))[:size].numpy()
        for key, value in whole.items()
    }


def write_float(model: Any, data: list[Any], file: Path, free_batch: bool) -> None:
    """The float file, as torch writes it."""
    import torch

    first = names_of(data[0])
    args, kwargs = ((), first) if isinstance(data[0], dict) else ((data[0],), {})
    if free_batch and not kwargs:
        args = (torch.cat([data[0], data[0]]),)
    elif free_batch:
        kwargs = {key: torch.cat([value, value]) for key, value in kwargs.items()}
    axes = {key: {0: torch.export.Dim("batch")} for key in first} if free_batch else None
    shapes = None if axes is None else axes if kwargs else (axes["x"],)
    with contextlib.redirect_stdout(io.StringIO()):
        program = torch.onnx.export(
            model,
            args,
            kwargs=kwargs,
            input_names=list(first),
            dynamic_shapes=shapes,
            dynamo=True,
            verbose=False,
        )
    assert program is not None
    program.save(str(file), external_data=False)


def write_peer(float_file: Path, data: list[Any], file: Path) -> str:
    """quantize_static's file; returns why there is none."""
    from onnxruntime import quantization as peer
    from onnxruntime.quantization.shape_inference import quant_pre_process

    class Reader(peer.CalibrationDataReader):  # type: ignore[misc]
        def __init__(self) -> None:
            self.batches = iter([{k: v.numpy() for k, v in names_of(batch).items()} for batch in data])

        def get_next(self) -> Any:
            return next(self.batches, None)

    prepared = float_file.with_name("prepared.onnx")
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            try:
                quant_pre_process(str(float_file), str(prepared))
            except Exception:  # its shape inference knows fewer ops than onnxruntime runs
                quant_pre_process(str(float_file), str(prepared), skip_symbolic_shape=True)
            peer.quantize_static(
                str(prepared),
                str(file),
                Reader(),
                quant_format=peer.QuantFormat.QDQ,
                per_channel=True,
                activation_type=peer.QuantType.QUInt8,
                weight_type=peer.QuantType.QInt8,
            )
            session(file)
    except Exception as error:
        return f"{type(error).__name__}: {str(error)[:100]}"
    return ""


def session(file: Path, threads: int = 0) -> Any:
    import onnxruntime as ort

    options = ort.SessionOptions()
    options.intra_op_num_threads = threads
    options.log_severity_level = 4
    return ort.InferenceSession(str(file), options, providers=["CPUExecutionProvider"])


def best_times(
    files: dict[str, Path], feed: dict[str, Any], seconds: float, threads: int = 0
) -> dict[str, float]:
    """Milliseconds; the files take turns, so that they see the same machine.

    A turn is several runs: the first one pays for the caches and the waiting threads of the session before it.
    """
    sessions = {key: session(file, threads) for key, file in files.items()}
    inputs = {key: dict(zip([i.name for i in s.get_inputs()], feed.values())) for key, s in sessions.items()}
    best = dict.fromkeys(files, float("inf"))
    for s, key in ((s, key) for key, s in sessions.items()):
        s.run(None, inputs[key])
    rounds, end = 0, time.perf_counter() + seconds
    while rounds < 3 or time.perf_counter() < end:
        for key, s in sessions.items():
            for _ in range(RUNS):
                start = time.perf_counter()
                s.run(None, inputs[key])
                best[key] = min(best[key], (time.perf_counter() - start) * 1000)
        rounds += 1
    return best


def ratios(row: dict[str, Any], size: int) -> tuple[float, float]:
    """Ours by float, and by quantize_static."""
    ms = row.get(f"ms_{size}") or row.get("ms_1")
    if ms is None:  # only written
        return float("nan"), float("nan")
    return ms["ours"] / ms["float"], ms["ours"] / ms.get("peer", float("nan"))


def write_table(folder: Path, start: dict[str, Any]) -> None:
    """The figures of all models in the folder that were timed, into docs/."""
    import charts
    import figures

    rows = []
    for file in (folder / name / "row.json" for name in zoo_speed_models.NAMES):
        row = json.loads(file.read_text()) if file.exists() else {}
        if "times" not in row:
            continue
        wanted = ("model", "cnn", "ok", "integer_share", "predicted")
        shown: dict[str, Any] = {key: row[key] for key in wanted if key in row}
        for where, times in row["times"].items():
            for size, ms in times.items():
                found = ratios({size: ms}, int(size.removeprefix("ms_")))
                shown[f"{where} {size}"] = [None if math.isnan(x) else round(x, 3) for x in found]
        rows.append(shown)
    print(figures.save("zoo_speed", rows, start))
    charts.write()


def summary(rows: list[dict[str, Any]], batches: list[int]) -> list[str]:
    lines = []
    for size in batches:
        found = [(row, *ratios(row, size)) for row in rows if "ms_1" in row or f"ms_{size}" in row]
        slow = [
            f"{row['model']} {max(a, 0 if math.isnan(b) else b):.2f}"
            for row, a, b in found
            if a > SLOWEST or (not math.isnan(b) and b > SLOWEST)
        ]
        cnn = [(a, b) for row, a, b in found if row["cnn"]]
        lines.append(
            f"batch {size}: {len(found)} models; slower than {SLOWEST} x the faster one: {', '.join(slow) or 'none'}"
        )
        for what, values, most in (
            ("float", [a for a, _ in cnn], CNN_FLOAT),
            ("quantize_static", [b for _, b in cnn if not math.isnan(b)], CNN_PEER),
        ):
            if values:
                mean = math.exp(sum(map(math.log, values)) / len(values))
                lines.append(f"  CNNs, geometric mean / {what}: {mean:.3f} (bar {most})")
    lines += [f"error: {row['model']}: {row['error']}" for row in rows if "error" in row]
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", nargs="+", default=zoo_speed_models.NAMES)
    parser.add_argument("--batches", nargs="+", type=int, default=[1, 8])
    parser.add_argument("--seconds", type=float, default=4.0, help="of timing per model and batch size")
    parser.add_argument("--threads", type=int, default=0, help="of a session; 0: as onnxruntime chooses")
    parser.add_argument("--save", type=Path)
    parser.add_argument("--work", type=Path, help="folder where the files are kept")
    parser.add_argument("--step", choices=["write", "time", "both", "table"], default="both")
    parser.add_argument("--where", default="here", help="of --step time: a name of the CPU")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.step != "both" and args.work is None:
        parser.error(f"--step {args.step} needs --work")
    if args.step == "table":
        import figures

        write_table(args.work, figures.started())
        return
    if args.one:
        print("ROW " + json.dumps(measure(args)))
        return
    print(
        f"{platform.processor() or platform.machine()}; for each batch size: time ours / float, ours / quantize_static"
    )
    rows = []
    for name in args.models:
        command = [
            sys.executable,
            __file__,
            "--one",
            name,
            "--seconds",
            str(args.seconds),
            "--threads",
            str(args.threads),
            "--where",
            args.where,
            "--batches",
            *map(str, args.batches),
            "--step",
            args.step,
            *(["--work", str(args.work)] if args.work else []),
        ]
        done = subprocess.run(command, capture_output=True, text=True)
        found = [line[4:] for line in done.stdout.splitlines() if line.startswith("ROW ")]
        row = (
            json.loads(found[0])
            if found
            else {"model": name, "error": (done.stderr.strip() or "no row").splitlines()[-1][:300]}
        )
        rows.append(row)
        if "error" in row:
            print(f"{name:28} error: {row['error']}", flush=True)
        else:
            shown = "  ".join("b{} {:.2f} {:.2f}".format(size, *ratios(row, size)) for size in args.batches)
            print(
                f"{name:28} {shown}  {'ok' if row['ok'] else 'NOT OK'}  int {row['integer']}  float {row['float']}",
                flush=True,
            )
        if args.save:
            args.save.write_text(json.dumps(rows, indent=1))
    print("\n".join(summary(rows, args.batches)))


if __name__ == "__main__":
    main()
