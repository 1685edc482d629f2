"""Quantizers on networks with real weights: ours beside NNCF and onnxruntime's quantize_static, in a plain session.

    python benchmarks/real_networks.py prepare            fetch weights, write float files and data
    python benchmarks/real_networks.py float              run the float files: the reference of all that follows
    python benchmarks/real_networks.py ours               quantize, export, run, judge; a minute or less per network
    python benchmarks/real_networks.py peer nncf static   the same for the other tools, in venvs that this makes;
                                                          `peer openvino --runtime openvino`: NNCF for OpenVINO
    python benchmarks/real_networks.py score              run and judge the files that are there again
    python benchmarks/real_networks.py time               files in turns, one thread, batch 1; run it on a quiet machine
    python benchmarks/real_networks.py table              all side by side, and the bars; --save writes the pages

Options: `--models "YOLOX-nano" FastestDet` takes some networks; `--work FOLDER` keeps the results elsewhere than in
build/real_networks. `ours --config PRESET_OR_FILE --backend openvino --as NAME` tries something else beside the
default. `score` and `time` take `--where NAME` with the environment variable SPARSEBIT_ORT_SITE=FOLDER, which is put
first on sys.path of the process that runs the files: another onnxruntime, for a stand-in of another CPU; and
`--runtime openvino`, in a venv of its own.

Everything is calibrated on one part of the data and judged on another. A [95 % interval] is a bootstrap over the judged
samples. Needs SPARSEBIT_ASSETS.
"""

from __future__ import annotations

import argparse
import json
import logging
import shutil
import subprocess
import sys
import time
import warnings
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent / "src")]

import assets
import peers
from real import packages
from real.place import Place, read, write

NNCF_VERSION = next(name for name in peers.PACKAGES["nncf"] if name.startswith("nncf==")).partition("==")[2]
PEERS = {
    "nncf": ("nncf", "nncf-mixed"),
    "openvino": ("openvino-nncf", "openvino-nncf-mixed"),
    "static": ("static-minmax", "static-reduced", "static-percentile", "static-entropy"),
}
STEPS = ("prepare", "float", "ours", "peer", "score", "time", "table")


# -- one step for one network ------------------------------------------------------------------------------
def prepare(network: Any, place: Place, args: argparse.Namespace) -> None:
    shutil.rmtree(place.folder, ignore_errors=True)  # results on other data
    place.folder.mkdir(parents=True)
    network.prepare(place)
    print(f"{network.name}: {place.folder}")


def floating(network: Any, place: Place, args: argparse.Namespace) -> None:
    require(run_and_score(network, place, "float", args))


def ours(network: Any, place: Place, args: argparse.Namespace) -> None:
    from real import ours as tool

    place.forget(args.label)
    try:
        tool.write(network, place, args.label, args.config, args.backend)
    except Exception as error:
        write(place.made(args.label), {"failed": f"{type(error).__name__}: {error}"[:300]})
        raise
    show_score(network, place, args.label, "simulated")
    require(run_and_score(network, place, args.label, args))


def peer(network: Any, place: Place, args: argparse.Namespace) -> None:
    for tool in [tool for name in args.tools or ("nncf", "static") for tool in PEERS.get(name, (name,))]:
        place.forget(tool)
        start = time.monotonic()
        command = [
            *(packages.python_of(tool, args.work), str(HERE / "real" / "write_peer.py"), tool),
            *map(str, (place.file("float"), place.calibrate, place.file(tool))),
            *(["--attention"] if network.attention else []),
        ]
        done = subprocess.run(command, capture_output=True, text=True)
        made: dict[str, Any] = {"seconds": round(time.monotonic() - start, 1)}
        if done.returncode:
            made["failed"] = (done.stderr.strip() or "no message").splitlines()[-1][:300]
            print(f"{network.name} {tool}: {made['failed']}", flush=True)
        elif not run_and_score(network, place, tool, args):
            made["failed"] = "the file does not run"
        write(place.made(tool), made)


def score(network: Any, place: Place, args: argparse.Namespace) -> None:
    tools = files_of(place, args)
    ran = [run_and_score(network, place, tool, args) for tool in tools]
    require(all(ran))


def files_of(place: Place, args: argparse.Namespace) -> list[str]:
    """The tools that are asked for and have a file; of all of them, those that the runtime reads."""
    known = ["float", *place.tools()]
    read_here = [tool for tool in known if args.runtime == "openvino" or not tool.startswith("openvino")]
    return [tool for tool in args.tools or read_here if place.file(tool).is_file()]


def require(ran: bool) -> None:
    if not ran:
        sys.exit(1)


def run_and_score(network: Any, place: Place, tool: str, args: argparse.Namespace) -> bool:
    """Whether the file runs."""
    files = (place.file(tool), place.judge, place.outputs(tool, args.where))
    command = [runner(args), str(HERE / "real" / "run_file.py"), *map(str, files), *how(args)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        place.score(tool, args.where).unlink(missing_ok=True)
        print(f"{network.name} {tool} {args.where}: {done.stderr.strip()[-1000:]}", flush=True)
        return False
    show_score(network, place, tool, args.where)
    return True


def show_score(network: Any, place: Place, tool: str, where: str) -> None:
    from real import scores

    print(scores.line(scores.score(network, place, tool, where)), flush=True)


def measure_time(network: Any, place: Place, args: argparse.Namespace) -> None:
    pairs = [f"{tool}={place.file(tool)}" for tool in dict.fromkeys(["float", *files_of(place, args)])]
    command = [runner(args), str(HERE / "real" / "time_files.py"), str(place.timed), *pairs, *how(args)]
    done = subprocess.run([*command, "--seconds", str(args.seconds)], capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"{network.name}: {done.stderr.strip()[-1000:]}")
    best = json.loads(done.stdout.splitlines()[-1])
    known = read(place.times(args.where))
    found = {tool: {"ms": ms, "ratio": ms / best["float"]} for tool, ms in best.items()}
    write(place.times(args.where), {**known, **found})
    shown = ", ".join(f"{tool} {row['ratio']:.2f}" for tool, row in found.items())
    print(f"{network.name:13} float {best['float']:.2f} ms; {shown}", flush=True)


def runner(args: argparse.Namespace) -> str:
    """The interpreter that runs the files."""
    if args.python:
        return str(args.python)
    return packages.python_of("openvino", args.work) if args.runtime == "openvino" else sys.executable


def how(args: argparse.Namespace) -> list[str]:
    return ["--runtime", args.runtime, "--threads", str(args.threads)]


RUN = {
    "prepare": prepare,
    "float": floating,
    "ours": ours,
    "peer": peer,
    "score": score,
    "time": measure_time,
}


# -- the command line --------------------------------------------------------------------------------------
def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("step", choices=STEPS)
    parser.add_argument("tools", nargs="*", help="of peer, score and time; all, if left out")
    parser.add_argument("--models", nargs="+", metavar="NAME", help="some networks; all, if left out")
    parser.add_argument("--work", type=Path, default=HERE.parent / "build" / "real_networks")
    parser.add_argument("--config", help="of ours: a preset or a file; the default, if left out")
    parser.add_argument("--backend", help="of ours: of the config and of the export")
    parser.add_argument("--as", dest="label", default="ours", help="of ours and table: the name of this try")
    parser.add_argument(
        "--save", action="store_true", help="of table: keep it in docs/figures and in the pages"
    )
    parser.add_argument("--where", help="name of the place where files run; here, or the runtime")
    parser.add_argument("--runtime", choices=["onnxruntime", "openvino"], default="onnxruntime")
    parser.add_argument("--python", type=Path, help="the interpreter that runs the files")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=8.0, help="of timing per network")
    args = parser.parse_args()
    args.work = args.work.resolve()
    args.where = args.where or ("here" if args.runtime == "onnxruntime" else args.runtime)
    return args


def show_table(places: dict[str, Place], args: argparse.Namespace) -> None:
    from real import table

    print(table.text(places, args.where, args.label))
    if args.save:
        import charts
        import figures

        rows = table.kept(places, args.where, args.label)
        print(figures.save("real_networks", rows, figures.started(), versions={"nncf": NNCF_VERSION}))
        charts.write()


def alone(name: str) -> int:
    """The same step for one network, in a process of its own."""
    left = sys.argv[1:]
    if "--models" in left:
        start = left.index("--models")
        end = next((i for i in range(start + 1, len(left)) if left[i].startswith("--")), len(left))
        del left[start:end]
    return subprocess.run([sys.executable, __file__, *left, "--models", name]).returncode


def main() -> None:
    args = arguments()
    if assets.MISSING:
        sys.exit(assets.MISSING)
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    packages.importable(args.work)
    from real.catalog import NETWORKS

    names = args.models or list(NETWORKS)
    unknown = [name for name in names if name not in NETWORKS]
    if unknown:
        sys.exit(f"--models: {', '.join(unknown)}: not one of {', '.join(NETWORKS)}")
    if args.step == "table":
        show_table({name: Place(args.work, name) for name in names}, args)
        return
    if len(names) > 1:
        failed = [name for name in names if alone(name)]
        sys.exit(f"failed: {', '.join(failed)}" if failed else 0)
    place = Place(args.work, names[0])
    if args.step != "prepare" and not place.prepared:
        sys.exit(f"{names[0]}: no float file and data in {place.folder}; run the step prepare first")
    RUN[args.step](NETWORKS[names[0]], place, args)


if __name__ == "__main__":
    main()
