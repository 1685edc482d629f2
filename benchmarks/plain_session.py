"""Files in a plain session of onnxruntime, on several CPUs: accuracy, codes, time (needs SPARSEBIT_ASSETS).

python benchmarks/plain_session.py write FOLDER           quantize and export the networks; needs torch
python benchmarks/plain_session.py run FOLDER CPU         run the files; needs only onnxruntime and onnx, so that
                                                          qemu-x86_64 -cpu Haswell python ... stands in for a CPU
                                                          without VNNI; CPU is any name for what it runs on
python benchmarks/plain_session.py score FOLDER           accuracy on each CPU beside the model and the float model
python benchmarks/plain_session.py time FOLDER            8-bit files with and without the pair rule, in turns
"""

from __future__ import annotations

import argparse
import contextlib
import io
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]
CODES = 2  # images whose codes are kept


# -- write -------------------------------------------------------------------------------------------------
def mobilenet_v2() -> Any:
    import assets

    known, x, y = assets.split_imagenet()
    return assets.mobilenet_v2(), list(known.split(25)), x, {"y": y}


def resnet20() -> Any:
    import assets

    x, y = assets.cifar10("test")
    return assets.cifar_resnet(20), list(assets.cifar10("train20k", 256)[0].split(32)), x, {"y": y}


def fastestdet() -> Any:
    """Calibrated on 128 pictures of ImageNet, evaluated on the 79 of COCO."""
    import torch
    from torch.nn.functional import interpolate

    import assets

    module = load(assets.ASSETS / "fastestdet" / "model.py")
    net = module.FastestDet()
    file = assets.ASSETS / "fastestdet" / "fastestdet_coco.pth"
    net.load_state_dict(torch.load(file, map_location="cpu", weights_only=True))
    images = assets.split_imagenet()[0][:128] * assets.STD + assets.MEAN
    known = interpolate(images.flip(1), (352, 352), mode="bilinear")  # blue first
    seen: list[Array] = []
    coco = load(assets.ASSETS / "coco_val79" / "detect_eval.py")

    def keep(x: Array) -> Any:
        seen.append(x)
        raise StopIteration

    for entry in coco.IMGS:
        picture = np.asarray(coco.Image.open(f"{coco.R}val2017/{entry['file_name']}").convert("RGB"))
        with contextlib.suppress(StopIteration):
            coco.fastest(keep)(picture)
    return net.eval(), list(known.split(16)), torch.from_numpy(np.concatenate(seen)), {}


def yolo() -> Any:
    import torch

    import detectors

    torch.manual_seed(0)
    net = detectors.trained(detectors.Yolo(detectors.CLASSES), detectors.box_loss, 600)
    known, (x, _, boxes) = detectors.shapes(128, 0)[0], detectors.shapes(500, 1)
    return net, list(known.split(16)), x, {"boxes": boxes}


def segmenter() -> Any:
    import torch

    import detectors

    torch.manual_seed(0)
    net = detectors.trained(detectors.Segmenter(detectors.CLASSES + 1), detectors.pixel_loss, 300)
    known, (x, masks, _) = detectors.shapes(128, 0)[0], detectors.shapes(500, 1)
    return net, list(known.split(16)), x, {"masks": masks}


NETS: dict[str, Callable[[], Any]] = {
    f.__name__: f for f in (resnet20, yolo, segmenter, fastestdet, mobilenet_v2)
}


def load(path: Path) -> Any:
    from importlib.util import module_from_spec, spec_from_file_location

    spec = spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def write(folder: Path, names: list[str]) -> None:
    import torch

    import sparsebit
    from sparsebit.errors import ExportError

    default = sparsebit.QuantConfig.load("w8a8")
    for name in names:
        net, known, x, truth = NETS[name]()
        for rule in (True, False):
            qmodel = sparsebit.quantize(net, known, default.override("W.PAIR_RULE", rule), progress=False)
            file = folder / f"{name}{'' if rule else '.unruled'}.onnx"
            try:
                report = qmodel.export_onnx(
                    x[:2], str(file), ["x"], dynamic_axes={"x": {0: "batch"}}, batches=[x[2:10]]
                )
            except ExportError as error:
                print(f"{file.name}: {error}")
                continue
            print(f"-- {file.name}\n{report}", flush=True)
            if rule:
                expose_codes(file)
                with torch.no_grad():
                    model, floating = (outputs(m, x) for m in (qmodel, net))
                np.save(folder / f"{name}.x.npy", x.numpy())
                known_answers = {k: v.numpy() for k, v in truth.items()}
                np.savez(folder / f"{name}.truth.npz", **known_answers)
                np.savez(folder / f"{name}.model.npz", *model)
                np.savez(folder / f"{name}.float.npz", *floating)


def outputs(model: Any, x: Any) -> list[Array]:
    import torch

    found = [model(part) for part in x.split(50)]
    return [torch.cat(part).numpy() for part in zip(*[(f,) if torch.is_tensor(f) else f for f in found])]


def expose_codes(file: Path) -> None:
    """<name>.codes.onnx: the optimised graph, every tensor of codes an output."""
    import onnx
    import onnx.helper

    from sparsebit.export.certificate.optimised_graph import optimised

    model = optimised(file)
    codes = [
        name
        for node in model.graph.node
        for name in node.output
        if node.op_type == "QuantizeLinear" or node.op_type.startswith("QLinear")
    ]
    del model.graph.output[:]
    model.graph.output.extend(onnx.ValueInfoProto(name=name) for name in codes)
    onnx.save(model, str(file.with_suffix(".codes.onnx")))


# -- run: neither torch nor Sparsebit ----------------------------------------------------------------------
def run(folder: Path, names: list[str], cpu: str, images: int | None) -> None:
    for name in names:
        x = np.load(folder / f"{name}.x.npy", mmap_mode="r")[:images]
        start = time.perf_counter()
        session = plain(folder / f"{name}.onnx")
        found = [session.run(None, {"x": np.ascontiguousarray(part)}) for part in parts(x)]
        np.savez(folder / f"{name}.on.{cpu}.npz", *map(np.concatenate, zip(*found)))
        codes = plain(folder / f"{name}.codes.onnx")
        values = codes.run(None, {"x": np.ascontiguousarray(x[:CODES])})
        named = {str(i): value for i, value in enumerate(values)}
        np.savez(folder / f"{name}.codes.{cpu}.npz", **named)
        print(f"{name}: {len(x)} images, {time.perf_counter() - start:.0f} s", flush=True)


def parts(x: Array) -> list[Array]:
    return [x[i : i + 10] for i in range(0, len(x), 10)]


def plain(file: Path) -> Any:
    """As users load a file."""
    import onnxruntime

    return onnxruntime.InferenceSession(str(file), providers=["CPUExecutionProvider"])


# -- score -------------------------------------------------------------------------------------------------
def arrays(file: Path) -> list[Array]:
    with np.load(file) as found:
        return [found[key] for key in found.files]


def score(folder: Path, names: list[str]) -> None:
    for name in names:
        model, floating = arrays(folder / f"{name}.model.npz"), arrays(folder / f"{name}.float.npz")
        with np.load(folder / f"{name}.truth.npz") as found:
            truth = dict(found)
        runs = {
            file.name.split(".on.")[1][:-4]: arrays(file) for file in sorted(folder.glob(f"{name}.on.*.npz"))
        }
        for who, got in {"float": floating, "model": model, **runs}.items():
            n = len(got[0])
            ours = [part[:n] for part in model]
            line = f"{name:<13} {who:<10} {n:>6} images: {accuracy(name, got, truth)}"
            if who != "float":
                line += f", {decibels(floating, got)} from float"
            if who in runs:
                line += (
                    f", {decibels(ours, got)} from the model; the model there: {accuracy(name, ours, truth)}"
                )
            print(line, flush=True)
        compare_codes(folder, name)


def decibels(expected: list[Array], got: list[Array]) -> str:
    found = []
    for a, b in zip(expected, got):
        a, b = a[: len(b)].astype(np.float64), b.astype(np.float64)
        noise = ((a - b) ** 2).sum()
        found.append(f"{10 * np.log10((a**2).sum() / noise):.2f}" if noise else "inf")
    return " / ".join(found) + " dB"


def accuracy(name: str, got: list[Array], truth: dict[str, Array]) -> str:
    import torch

    import detectors

    if name == "fastestdet":
        whole, half = average_precision(got[0])
        return f"AP {whole * 100:.2f}, AP50 {half * 100:.2f}"
    tensors = [torch.from_numpy(part) for part in got]
    if name == "yolo":
        boxes = torch.from_numpy(truth["boxes"][: len(tensors[0])])
        found = detectors.overlap(detectors.found_boxes(*tensors), boxes)
        return f"IoU {found.mean():.4f}, above 0.75: {(found > 0.75).float().mean():.1%}"
    if name == "segmenter":
        found, masks = got[0].argmax(1), truth["masks"][: len(got[0])]
        each = [((found == c) & (masks == c)).sum() / ((found == c) | (masks == c)).sum() for c in range(4)]
        return f"mIoU {np.mean(each):.4f}"
    return f"top-1 {np.mean(got[0].argmax(1) == truth['y'][: len(got[0])]):.2%}"


def average_precision(got: Array) -> tuple[float, float]:
    """AP and AP50 of FastestDet's outputs for the 79 images of COCO."""
    import assets

    coco = load(assets.ASSETS / "coco_val79" / "detect_eval.py")
    if len(got) < len(coco.IMGS):
        sys.exit(f"AP needs all {len(coco.IMGS)} images, and there are outputs for {len(got)}")
    answers = iter(got)
    with contextlib.redirect_stdout(io.StringIO()):
        stats = coco.evaluate(coco.fastest(lambda x: next(answers)[None]), "")
    return stats[0], stats[1]


def compare_codes(folder: Path, name: str) -> None:
    first, *others = sorted(folder.glob(f"{name}.codes.*.npz"))
    for other in others:
        pairs = list(zip(arrays(first), arrays(other)))
        differ, total = sum(int((a != b).sum()) for a, b in pairs), sum(a.size for a, _ in pairs)
        apart = max(int(np.abs(a.astype(int) - b.astype(int)).max()) for a, b in pairs)
        where = next((i for i, (a, b) in enumerate(pairs) if (a != b).any()), None)
        print(
            f"{name:<13} {first.name} and {other.name}: {differ} of {total} codes differ, by at most {apart}"
            + ("" if where is None else f", from tensor {where} of {len(pairs)}")
        )


# -- time --------------------------------------------------------------------------------------------------
def measure(folder: Path, names: list[str], rounds: int = 40) -> None:
    """Batch 1, one thread of onnxruntime's choice; the files take turns, and the best of each counts."""
    for name in names:
        files = {"pair rule": folder / f"{name}.onnx", "no rule": folder / f"{name}.unruled.onnx"}
        sessions = {kind: plain(file) for kind, file in files.items() if file.is_file()}
        x = np.ascontiguousarray(np.load(folder / f"{name}.x.npy", mmap_mode="r")[:1])
        best = dict.fromkeys(sessions, float("inf"))
        for _ in range(rounds):
            for kind, session in sessions.items():
                start = time.perf_counter()
                session.run(None, {"x": x})
                best[kind] = min(best[kind], time.perf_counter() - start)
        print(name, ", ".join(f"{kind} {value * 1e3:.2f} ms" for kind, value in best.items()), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("step", choices=["write", "run", "score", "time"])
    parser.add_argument("folder", type=Path)
    parser.add_argument("cpu", nargs="?", default="here")
    parser.add_argument("--nets", nargs="+", choices=NETS, default=list(NETS))
    parser.add_argument("--images", type=int, help="of each network, in run; all, if left out")
    asked = parser.parse_args()
    if asked.step == "write":
        import assets

        if assets.MISSING:
            sys.exit(assets.MISSING)
        asked.folder.mkdir(parents=True, exist_ok=True)
        write(asked.folder, asked.nets)
    elif asked.step == "run":
        run(asked.folder, asked.nets, asked.cpu, asked.images)
    elif asked.step == "score":
        score(asked.folder, asked.nets)
    else:
        measure(asked.folder, asked.nets)


if __name__ == "__main__":
    main()
