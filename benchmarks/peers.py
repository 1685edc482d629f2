"""Figures of other tools, each in a venv of its own, set up by this script (needs SPARSEBIT_ASSETS, 10 GB of disk).

    python benchmarks/peers.py w8a8        MobileNetV2 in 8 bits: top-1, SQNR and time of every tool's file, and of ours
    python benchmarks/peers.py pruning     benchmarks/pruning.py beside torch-pruning
    python benchmarks/peers.py qat         benchmarks/qat_speed.py beside Brevitas
    python benchmarks/peers.py llm         benchmarks/llm.py beside llmcompressor

w8a8: each tool gets the same float model (or float file) and the same 250 images, as its own guide says, with its
defaults. The files are then judged here: on the other 750 images, in the same plain session of onnxruntime, timed in
turns at batch 1. torchao writes no file that onnxruntime runs in integers: its figures are from its simulation.
The results are kept in docs/figures/.
"""

from __future__ import annotations

import argparse
import logging
import os
import shlex
import subprocess
import sys
import tempfile
import venv
import warnings
from pathlib import Path
from typing import Any

import numpy as np

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
TORCH = "torch==2.13.0"  # before all else: an unpinned torch brings gigabytes of CUDA
FILES = ["numpy==2.4.6", "pillow==13.0.0", "onnx==1.23.2", "onnxruntime==1.31.1", "onnxscript==0.7.2"]
PACKAGES = {
    "onnxruntime": FILES,
    "nncf": ["nncf==3.4.0", *FILES],
    "openvino": ["openvino==2026.4.1", "nncf==3.4.0", "numpy==2.4.6"],
    "modelopt": ["nvidia-modelopt==0.47.0", "requests", "huggingface_hub", *FILES],
    "brevitas": ["brevitas==0.13.4", "onnxoptimizer", *FILES],
    "torchao": ["torchao==0.18.0", *FILES],
    "torch-pruning": ["torch-pruning==1.6.1", *FILES],
    "llmcompressor": ["llmcompressor==0.14.0.1"],
}
OWN = ("brevitas", "torch-pruning")  # run our scripts in their venv, so Sparsebit is installed there too


def python_of(peer: str, venvs: Path) -> str:
    """The interpreter of a peer's venv, which is made and filled where it is missing."""
    folder = venvs / peer
    python, done = folder / "bin" / "python", folder / "installed.txt"
    wanted = [TORCH, *PACKAGES[peer], *(["-e", f"{ROOT}[onnx]"] if peer in OWN else [])]
    if not done.is_file() or done.read_text() != "\n".join(wanted):
        print(f"setting up {peer} ...", flush=True)
        venv.create(folder, with_pip=True, symlinks=True)
        for packages in ([TORCH], wanted):
            subprocess.run([python, "-m", "pip", "install", "--quiet", *packages], check=True)
        done.write_text("\n".join(wanted))
    return str(python)


# -- W8A8: each runs in the venv of its tool, and writes a file or the logits of a simulation --------------
def fewer(images: Any) -> Any:
    return images[: int(os.environ.get("PEERS_IMAGES", len(images)))]


def calibration() -> Any:
    import assets

    return fewer(assets.split_imagenet()[0])


def onnxruntime(folder: Path, name: str) -> None:
    import zoo_speed

    failed = zoo_speed.write_peer(
        folder / "float.onnx", list(calibration().split(25)), folder / f"{name}.onnx"
    )
    if failed:
        sys.exit(failed)


def nncf(folder: Path, name: str) -> None:
    import nncf as tool
    import onnx

    images = calibration()
    preset = tool.QuantizationPreset.MIXED if name.endswith("mixed") else tool.QuantizationPreset.PERFORMANCE
    data = tool.Dataset([{"x": image.numpy()} for image in images.split(1)])
    model = tool.quantize(onnx.load(folder / "float.onnx"), data, subset_size=len(images), preset=preset)
    onnx.save(model, folder / f"{name}.onnx")


def modelopt(folder: Path, name: str) -> None:
    import modelopt.torch.quantization as tool
    import torch

    import assets

    images = calibration()

    def show(model: Any) -> None:
        for part in images.split(25):
            model(part)

    with torch.no_grad():
        model = tool.quantize(assets.mobilenet_v2(), tool.INT8_DEFAULT_CFG, show)
    write(model, images[:2], folder / f"{name}.onnx")


def brevitas(folder: Path, name: str) -> None:
    import torch
    from brevitas.export import export_onnx_qcdq
    from brevitas.graph.calibrate import bias_correction_mode, calibration_mode
    from brevitas.graph.quantize import preprocess_for_quantize, quantize

    import assets

    images = calibration()
    model = quantize(preprocess_for_quantize(assets.mobilenet_v2(), trace_model=True))
    with torch.no_grad():
        with calibration_mode(model):
            for part in images.split(25):
                model(part)
        with bias_correction_mode(model):
            for part in images.split(25):
                model(part)
    model.eval()
    names = {"input_names": ["x"], "output_names": ["y"], "dynamic_axes": {"x": {0: "batch"}}}
    export_onnx_qcdq(model, images[:2], export_path=str(folder / f"{name}.onnx"), dynamo=False, **names)


def torchao(folder: Path, name: str) -> None:
    import torch
    from torchao.quantization.pt2e import move_exported_model_to_eval
    from torchao.quantization.pt2e.quantize_pt2e import convert_pt2e, prepare_pt2e
    from torchao.quantization.pt2e.quantizer import x86_inductor_quantizer as x86

    import assets

    images, x = calibration(), fewer(assets.split_imagenet()[1])
    shapes = ({0: torch.export.Dim("batch")},)
    graph = torch.export.export(assets.mobilenet_v2(), (images[:2],), dynamic_shapes=shapes).module()
    tool = x86.X86InductorQuantizer().set_global(x86.get_default_x86_inductor_quantization_config())
    model = prepare_pt2e(graph, tool)
    with torch.no_grad():
        for part in images.split(25):
            model(part)
        model = move_exported_model_to_eval(convert_pt2e(model))
        np.save(folder / f"{name}.npy", assets.logits(model, x, 25).numpy())


def write(model: Any, example: Any, file: Path) -> None:
    """A torch model with fake quantizers, by torch's older exporter, as these tools want it."""
    import torch

    axes = {"x": {0: "batch"}}
    torch.onnx.export(model, (example,), str(file), input_names=["x"], dynamic_axes=axes, dynamo=False)


def sparsebit(folder: Path, name: str) -> None:
    import assets
    import sparsebit as tool

    images = calibration()
    qmodel = tool.quantize(assets.mobilenet_v2(), list(images.split(25)), progress=False)
    qmodel.export_onnx(images[:2], str(folder / f"{name}.onnx"), ["x"], dynamic_axes={"x": {0: "batch"}})


ROWS = {  # name of the row: what writes it
    "sparsebit": sparsebit,
    "nncf": nncf,
    "nncf mixed": nncf,
    "onnxruntime": onnxruntime,
    "modelopt": modelopt,
    "brevitas": brevitas,
    "torchao": torchao,
}


# -- W8A8: judged here, all alike -----------------------------------------
def w8a8(args: argparse.Namespace) -> None:
    import assets
    import figures
    import zoo_speed

    start = figures.started()
    _, x, y = assets.split_imagenet()
    x, y = x[: args.images], y[: args.images]
    environment = {**os.environ, "SPARSEBIT_ASSETS": str(assets.ASSETS)}
    if args.images:
        environment["PEERS_IMAGES"] = str(args.images)
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as place:
        folder = Path(args.folder or place)
        folder.mkdir(parents=True, exist_ok=True)
        net = assets.mobilenet_v2()
        zoo_speed.write_float(net, [x[:1]], folder / "float.onnx", True)
        reference = assets.logits(net, x, 25)
        rows.append({"tool": "float", "top1": round(assets.top1(reference, y), 2)})
        for name in args.rows:
            row, got = judged(name, folder, x, args.venvs, environment)
            if got is not None:
                row["top1"], row["sqnr"] = (
                    round(assets.top1(got, y), 2),
                    round(assets.sqnr(reference, got), 2),
                )
            rows.append(row)
            print(row, flush=True)
        files = {row["tool"]: folder / f"{row['tool']}.onnx" for row in rows}
        files = {name: file for name, file in files.items() if file.is_file()}
        best = zoo_speed.best_times(files, {"x": x[:1].numpy()}, args.seconds)
        for row in rows:
            if row["tool"] in best:
                row["ms"] = round(best[row["tool"]], 2)
                row["times_float"] = round(best[row["tool"]] / best["float"], 2)
                row["megabytes"] = round(files[row["tool"]].stat().st_size / 1e6, 2)
    for row in rows:
        print(row)
    if not args.images and args.rows == list(ROWS):
        print(figures.save("peers_w8a8", rows, start, command="python benchmarks/peers.py w8a8"))


def judged(
    name: str, folder: Path, x: Any, venvs: Path, environment: dict[str, str]
) -> tuple[dict[str, Any], Any]:
    """The row of one tool, and what its file (or its simulation) gives for `x`; None where it failed."""
    import torch

    import zoo_speed

    peer = ROWS[name].__name__
    python = sys.executable if peer == "sparsebit" else python_of(peer, venvs)
    row = {"tool": name, "version": version(python, peer)}
    file, simulated = folder / f"{name}.onnx", folder / f"{name}.npy"
    if not (file.is_file() or simulated.is_file()):
        command = [python, __file__, "--write", name, str(folder)]
        done = subprocess.run(command, env=environment, capture_output=True, text=True)
        if done.returncode:
            print(f"{name} failed:\n{done.stderr[-3000:]}", flush=True)
            return {**row, "failed": (done.stderr.strip() or "no message").splitlines()[-1][:200]}, None
    if simulated.is_file():
        return row, torch.from_numpy(np.load(simulated))[: len(x)]
    session = zoo_speed.session(file)
    key = session.get_inputs()[0].name
    return row, torch.from_numpy(
        np.concatenate([session.run(None, {key: p.numpy()})[0] for p in x.split(25)])
    )


def version(python: str, peer: str) -> str:
    distribution = {"modelopt": "nvidia-modelopt"}.get(peer, peer)
    code = f"import importlib.metadata as m; print(m.version({distribution!r}))"
    return subprocess.run([python, "-c", code], capture_output=True, text=True, check=True).stdout.strip()


# -- the others: our own scripts, in the venv of the tool -----------------------------------------
def script(args: argparse.Namespace) -> None:
    """Run one of our benchmarks beside a peer. It keeps the figures itself, unless there are options to try it out."""
    commands = {
        "pruning": ["pruning.py", "--methods", "torch-pruning", "l2norm", "l2norm, fast"],
        "qat": ["qat_speed.py"],
        "llm": ["llm.py", "smollm2", "--rows", "rtn", "gptq"],
    }
    name, *options = commands[args.job]
    peer = {"pruning": "torch-pruning", "qat": "brevitas", "llm": "llmcompressor"}[args.job]
    python = python_of(peer, args.venvs)
    if args.job == "llm":
        python, options = sys.executable, [*options, "--peer", python]
    subprocess.run(
        [python, str(HERE / name), *options, *(shlex.split(args.options) or ["--save"])], check=True
    )


def main() -> None:
    if sys.argv[1:2] == ["--write"]:  # inside the venv of a peer
        warnings.simplefilter("ignore")
        logging.disable(logging.WARNING)
        name, folder = sys.argv[2:]
        ROWS[name](Path(folder), name)
        return
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("job", choices=["w8a8", "pruning", "qat", "llm"])
    parser.add_argument("--venvs", type=Path, default=Path.home() / ".cache" / "sparsebit-peers")
    parser.add_argument(
        "--rows", nargs="+", choices=list(ROWS), default=list(ROWS), help="of w8a8; kept if all"
    )
    parser.add_argument("--images", type=int, help="fewer, to try it out; nothing is kept")
    parser.add_argument("--seconds", type=float, default=20.0, help="of timing")
    parser.add_argument("--folder", help="keep the files here, and take those that are here")
    parser.add_argument(
        "--options", default="", help="of the other jobs' script, to try it out; nothing is kept"
    )
    args = parser.parse_args()
    w8a8(args) if args.job == "w8a8" else script(args)


if __name__ == "__main__":
    main()
