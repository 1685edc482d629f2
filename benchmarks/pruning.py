"""Pruning CIFAR-10 ResNets to half their MACs, beside torch-pruning where it is installed (needs SPARSEBIT_ASSETS).

    python benchmarks/pruning.py [--depths 20 32 44] [--images 20000] [--methods l2norm "fpgm, fast" taylor ...]
        [--lr 0.05] [--seeds 0 1 2] [--no-speed] [--save]

Same weights, data, budget and one epoch of fine-tuning for all. Then the speed of what is left, in torch and in
onnxruntime, against the share of MACs; and the pruned network in 8 bits, with the certificate of its file.
`--save` keeps the figures in docs/figures/pruning.json.
"""

from __future__ import annotations

import argparse
import copy
import functools
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

import assets
import figures
import qat_cifar
import sparsebit
from sparsebit.sparse import SparseModel, merge

BUDGET = 0.5
METHODS = ["torch-pruning", "l2norm, no data", "l2norm", "fpgm", "fpgm, all", "l2norm, fast", "fpgm, fast"]


def macs(model: nn.Module) -> int:
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        model(torch.zeros(1, 3, 32, 32))
    return counter.get_total_flops() // 2


def ours(method: str, net: nn.Module, batches: list[tuple[Tensor, Tensor]]) -> tuple[nn.Module, float, float]:
    """(small, CPU seconds of the cut, of the passes over data); the forms of a strategy:

    l2norm            inner channels of the residual blocks, the same share of every layer, as torch-pruning does it;
                      with data, layers behind a cut are refit and batch norms re-estimated: what batches= does
    l2norm, no data   without that
    l2norm, all       channels of the residual streams too, of all layers together
    l2norm, fast      multiples of 8 inner channels, after residual blocks of 16 or 32 were put side by side, in pairs
    """
    strategy, _, form = method.partition(", ")
    sparser: dict[str, Any] = {"STRATEGY": strategy, "RATIO": 0.5}
    sparser |= {"SCOPE": "global" if form == "all" else "layer", "ROUND_TO": 8 if form == "fast" else 1}
    example, budget = torch.zeros(1, 3, 32, 32), BUDGET
    clock, data, original = time.process_time(), 0.0, net
    if form == "fast":
        data -= time.process_time()
        whole, net = macs(net), merge(net, example, "auto", batches)
        data += time.process_time()
        budget = min(1.0, budget * whole / macs(net))
    smodel = SparseModel(net, {"DEVICE": "cpu", "SPARSER": sparser}, example)
    if form != "all":
        smodel.disable_sparse_before_add()
    if form != "no data":
        data -= time.process_time()
        smodel.calibrate(batches)
        data += time.process_time()
    smodel.calc_params(macs=budget)
    if form != "no data":
        data -= time.process_time()
        smodel.tune_batchnorm(batches)
        smodel.refit(batches, original)
        data += time.process_time()
    small = smodel.compact()
    return small, time.process_time() - clock - data, data


def torch_pruning(net: nn.Module) -> tuple[nn.Module, float, float]:
    """L2 group magnitude, the same share of every layer; the ratio that just meets the budget.

    It cannot follow channels through the zero-padded shortcuts (the shapes no longer fit), so the residual streams
    stay whole and the inner channels of the blocks go.
    """
    import torch_pruning as tp

    clock, best = time.process_time(), None
    example, low, high = torch.zeros(1, 3, 32, 32), 0.0, 0.95
    for _ in range(8):
        ratio, small = (low + high) / 2, copy.deepcopy(net)
        pruner = tp.pruner.MagnitudePruner(
            small,
            example,
            importance=tp.importance.GroupMagnitudeImportance(p=2),
            pruning_ratio=ratio,
            ignored_layers=[
                m for n, m in small.named_modules() if n in ("conv1", "linear") or n.endswith("conv2")
            ],
        )
        pruner.step()
        if macs(small) > BUDGET * macs(net):
            low = ratio
        else:
            high, best = ratio, small
    if best is None:
        raise SystemExit("torch-pruning does not reach the budget")
    return best, time.process_time() - clock, 0.0


def fine_tune(net: nn.Module, x: Tensor, y: Tensor, lr: float, seed: int = 0) -> None:
    steps = -(-len(x) // qat_cifar.BATCH)
    optimizer = torch.optim.SGD(net.parameters(), lr, momentum=0.9, nesterov=True, weight_decay=5e-4)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, lr, steps, pct_start=0.1)
    net.train()
    for images, labels in qat_cifar.batches(x, y, 1, seed=seed):
        optimizer.zero_grad(set_to_none=True)
        F.cross_entropy(net(images), labels).backward()
        optimizer.step()
        schedule.step()
    net.eval()


def best_of(runs: dict[str, Callable[[], Any]], rounds: int = 60) -> dict[str, float]:
    """CPU time of one thread, interleaved, the best of each: machines are noisy."""
    best = dict.fromkeys(runs, float("inf"))
    for _ in range(rounds):
        for name, run in runs.items():
            start = time.process_time()
            run()
            best[name] = min(best[name], time.process_time() - start)
    return best


def speed(net: nn.Module, small: nn.Module) -> dict[str, float]:
    """How many times fewer MACs, and how many times faster in torch and in onnxruntime."""
    import onnxruntime as ort

    from sparsebit.export.export_module import export_module

    x = torch.randn(32, 3, 32, 32)
    options = ort.SessionOptions()
    options.intra_op_num_threads = 1
    with tempfile.TemporaryDirectory() as folder, torch.no_grad():
        runs: dict[str, Callable[[], Any]] = {"whole": lambda: net(x), "small": lambda: small(x)}
        for name, model in (("ort whole", net), ("ort small", small)):
            file = str(Path(folder) / f"{name}.onnx")
            export_module(model, x, file)
            session = ort.InferenceSession(file, options, providers=["CPUExecutionProvider"])
            feed = {session.get_inputs()[0].name: x.numpy()}
            runs[name] = lambda session=session, feed=feed: session.run(None, feed)
        best = best_of(runs)
    return {
        "fewer_macs": round(macs(net) / macs(small), 3),
        "faster_torch": round(best["whole"] / best["small"], 3),
        "faster_onnxruntime": round(best["ort whole"] / best["ort small"], 3),
    }


def eight_bits(small: nn.Module, x: Tensor, test: tuple[Tensor, Tensor]) -> dict[str, Any]:
    qmodel = sparsebit.quantize(small, list(x[:256].split(32)), progress=False)
    top1 = assets.top1(assets.logits(qmodel, test[0]), test[1])
    with tempfile.TemporaryDirectory() as folder:
        file, axes = str(Path(folder) / "small.onnx"), {"x": {0: "batch"}}
        report = qmodel.export_onnx(x[:8], file, ["x"], dynamic_axes=axes, batches=[test[0][:200]])
    return {"int8": round(top1, 2), "certified": report.ok, "kilobytes": round(report.bytes / 1e3)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--depths", type=int, nargs="+", default=[20, 32, 44])
    parser.add_argument("--methods", nargs="+", default=METHODS)
    parser.add_argument("--images", type=int, default=20000, help="of the epoch of fine-tuning")
    parser.add_argument("--lr", type=float, default=0.05)
    parser.add_argument(
        "--seeds", type=int, nargs="+", default=[0], help="orders of the images; the mean is shown"
    )
    parser.add_argument("--no-speed", action="store_true")
    parser.add_argument("--save", action="store_true", help="keep the figures in docs/figures/pruning.json")
    options = parser.parse_args()
    start, rows = figures.started(), []
    torch.set_num_threads(1)
    if assets.MISSING:
        raise SystemExit(assets.MISSING)
    x, y = assets.cifar10("train20k", options.images)
    test = assets.cifar10("test")
    top1 = lambda model: assets.top1(assets.logits(model, test[0]), test[1])
    batches = list(zip(x[:1280].split(64), y[:1280].split(64)))
    for depth in options.depths:
        net = assets.cifar_resnet(depth)
        print(f"ResNet-{depth}: float {top1(net):.2f} %, {macs(net) / 1e6:.1f} M MACs", flush=True)
        for method in options.methods:
            try:
                prune = (
                    torch_pruning
                    if method == "torch-pruning"
                    else functools.partial(ours, method, batches=batches)
                )
                prune(net) if method == "torch-pruning" else ours(
                    "l2norm, no data", net, []
                )  # for the imports
                torch.manual_seed(0)
                small, cut, data = prune(net)
            except ImportError:
                print(f"  {method:15s} not installed: pip install --no-deps torch-pruning==1.6.1")
                continue
            share = macs(small) / macs(net)
            right_after = top1(small)
            tuned = []
            for seed in options.seeds:
                trained = copy.deepcopy(small)
                fine_tune(trained, x, y, options.lr, seed)
                tuned.append(top1(trained))
            small = trained
            row: dict[str, Any] = {"model": f"ResNet-{depth}", "method": method, "macs": round(share, 3)}
            row |= {"cut_cpu_seconds": round(cut, 2), "data_cpu_seconds": round(data, 1)}
            row |= {"right_after": round(right_after, 2), "after_epoch": round(sum(tuned) / len(tuned), 2)}
            row |= {"each_order": [round(value, 2) for value in tuned]} if len(tuned) > 1 else {}
            row |= eight_bits(small, x, test) if method != "torch-pruning" else {}
            row |= {} if options.no_speed else speed(net, small)
            rows.append(row)
            print("  " + ", ".join(f"{key} {value}" for key, value in row.items()), flush=True)
    if options.save:
        figures.save("pruning", rows, start, versions=figures.versions(("torch-pruning",)))


if __name__ == "__main__":
    main()
