"""Two ranks over gloo: the scales of one process with all the batches, bit for bit; training steps of the whole batch.

All ranks' work is done in one pair of processes; what they found is compared here.
"""

from __future__ import annotations

import datetime
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from sparsebit import QuantConfig, QuantModel
from sparsebit.quantization.observers import OBSERVERS_MAP
from sparsebit.quantization.observers.ranks import RunningSum
from sparsebit.quantization.qat import Stages
from sparsebit.quantization.quantizers import QUANTIZERS_MAP

pytestmark = pytest.mark.skipif(not dist.is_available(), reason="this torch has no torch.distributed")

OBSERVERS, QUANTIZERS = sorted(OBSERVERS_MAP), sorted(QUANTIZERS_MAP)
OBSERVERS.remove("auto")  # several processes do not choose: it warns, and takes mean_minmax
WRAPS = ["ddp", "fsdp"]
KINDS = ["lsq", "lsq+", "pact", "stages"]


# -- what the ranks do ---------------------------------------------------------------------------------------
class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(3, 6, 3, padding=1), nn.BatchNorm2d(6)
        self.conv2 = nn.Conv2d(6, 4, 3, stride=2)
        self.fc = nn.Linear(4, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.relu(self.bn1(self.conv1(x)))
        return self.fc(F.silu(self.conv2(x)).mean((2, 3)))


def data() -> list[torch.Tensor]:
    g = torch.Generator().manual_seed(0)
    sizes = (4, 4, 3, 4, 4, 5)  # ranks need not have as many images
    return [torch.randn(n, 3, 9, 9, generator=g) * (1 + i) for i, n in enumerate(sizes)]


def configs() -> dict[str, QuantConfig]:
    """Every observer per tensor and per channel, every quantizer for weights and activations, and more."""
    base = QuantConfig.load({"BACKEND": "virtual", "SCHEDULE": {"FUSE_BN": True}})
    found = {}
    for name in OBSERVERS:
        for scheme in ("per-tensor-affine", "per-channel-symmetric"):
            found[f"{name} {scheme}"] = base.override("A.OBSERVER.TYPE", name, "A.QSCHEME", scheme)
    for name in QUANTIZERS:
        letters = {"pact": "A", "adaround": "W"}.get(name, "WA")
        types = [
            v for letter in letters for v in (f"{letter}.QUANTIZER.TYPE", name, f"{letter}.QUANTIZER.BIT", 4)
        ]
        found[name] = base.override(*types, "W.QUANTIZER.ADAROUND.STEPS", 1)
    found["w8a8"] = QuantConfig.load("w8a8")  # equalized, with bias correction
    found["asym"] = QuantConfig.load("w8a8").override("W.QUANTIZER.BIT", 3, "A.QUANTIZER.BIT", 3)
    return found


def share(name: str, rank: int, world: int) -> list[torch.Tensor]:
    """Every other batch; in blocks where the order counts."""
    half = len(data()) // world
    return data()[rank * half : (rank + 1) * half] if "moving" in name else data()[rank::world]


def net() -> nn.Module:
    torch.manual_seed(0)
    return Net().eval()


def calibrated(name: str, cfg: QuantConfig, batches: list[torch.Tensor]) -> dict[str, torch.Tensor]:
    return QuantModel(net(), cfg).calibrate(batches, asym=name == "asym").state_dict()


def no_batches(rank: int) -> dict[str, torch.Tensor]:
    """Only rank 0 has data."""
    qmodel = QuantModel(net(), configs()["mse per-tensor-affine"])
    qmodel.prepare_calibration(asym=False)
    for x in data() if rank == 0 else ():
        qmodel(x)
    qmodel.calc_qparams()
    return qmodel.state_dict()


def trained(wrap: str, kind: str, rank: int, world: int) -> dict[str, torch.Tensor]:
    """Three steps, each rank with its part of the batch; the state afterwards, whole."""
    w, a = {"pact": ("dorefa", "pact"), "stages": ("lsq", "lsq")}.get(kind, (kind, kind))
    cfg = QuantConfig.load({"BACKEND": "virtual", "SCHEDULE": {"FUSE_BN": True}}).override(
        "W.QUANTIZER.TYPE", w, "A.QUANTIZER.TYPE", a
    )
    qmodel = QuantModel(net(), cfg.override("W.QUANTIZER.BIT", 4, "A.QUANTIZER.BIT", 4)).calibrate(
        data()[rank::world]
    )
    qmodel.init_QAT()
    model: Any = qmodel.train()
    if wrap == "ddp":
        model = nn.parallel.DistributedDataParallel(qmodel, find_unused_parameters=kind == "stages")
    elif wrap == "fsdp":
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        mesh = init_device_mesh("cpu", (world,))
        fully_shard(qmodel.model.conv2, mesh=mesh)
        fully_shard(qmodel, mesh=mesh)
    optimizer = torch.optim.SGD(qmodel.qat_parameter_groups(0.05, 0.05, 1e-3), momentum=0.9)
    stages = Stages(qmodel, activations=2 if kind == "stages" else 0)
    g = torch.Generator().manual_seed(3)
    for _ in range(3):
        x, y = torch.randn(8, 3, 9, 9, generator=g), torch.randint(5, (8,), generator=g)
        part = slice(rank * 8 // world, (rank + 1) * 8 // world)
        optimizer.zero_grad()
        F.cross_entropy(model(x[part]), y[part]).backward()
        optimizer.step()
        stages.step()
    full = lambda t: t.full_tensor() if hasattr(t, "full_tensor") else t
    return {key: full(value).detach().clone() for key, value in qmodel.state_dict().items()}


def rank_main(rank: int, world: int, folder: str) -> None:
    torch.set_num_threads(1)
    found: dict[str, Any] = {}
    if rank == 0:  # what one process gets, before anybody knows of others
        found["alone"] = {name: calibrated(name, cfg, data()) for name, cfg in configs().items()}
        found["one"] = {kind: trained("", kind, 0, 1) for kind in KINDS}
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder}/meet",
        rank=rank,
        world_size=world,
        timeout=datetime.timedelta(seconds=120),
    )
    found["shared"] = {
        name: calibrated(name, cfg, share(name, rank, world)) for name, cfg in configs().items()
    }
    found["no batches"] = no_batches(rank)
    for wrap in WRAPS:
        found[wrap] = {kind: trained(wrap, kind, rank, world) for kind in KINDS}
    dist.destroy_process_group()
    torch.save(found, Path(folder) / f"{rank}.pt")


# -- what they found -----------------------------------------------------------------------------------------
@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    folder = tmp_path_factory.mktemp("ranks")
    torch.multiprocessing.spawn(rank_main, args=(2, str(folder)), nprocs=2)
    return [torch.load(folder / f"{rank}.pt") for rank in range(2)]


def differing(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor], only: str = "") -> list[str]:
    assert list(a) == list(b)
    return [name for name in a if only in name and not torch.equal(a[name], b[name])]


@pytest.mark.parametrize("name", list(configs()))
def test_two_ranks_calibrate_like_one_process(ranks, name):
    """Scales, zero points, ranges, corrected biases: all of the state."""
    alone = ranks[0]["alone"][name]
    assert any(key.endswith("input_quantizer.scale") for key in alone)
    only = "input_quantizer" if name == "adaround" else ""  # its weights are learned, not calibrated
    assert not differing(alone, ranks[0]["shared"][name], only)
    assert not differing(alone, ranks[1]["shared"][name], only)


def test_ranks_agree_on_what_is_learned(ranks):
    assert not differing(ranks[0]["shared"]["adaround"], ranks[1]["shared"]["adaround"])


def test_a_rank_without_batches_gets_the_scales_too(ranks):
    alone = ranks[0]["alone"]["mse per-tensor-affine"]
    assert not differing(alone, ranks[0]["no batches"]) and not differing(alone, ranks[1]["no batches"])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("wrap", WRAPS)
def test_training_steps_are_those_of_the_whole_batch(ranks, wrap, kind):
    one, first, second = ranks[0]["one"][kind], ranks[0][wrap][kind], ranks[1][wrap][kind]
    assert not differing(first, second)  # ranks stay equal, to the last bit
    for name, value in one.items():
        torch.testing.assert_close(first[name], value, rtol=1e-4, atol=1e-6, msg=lambda m: f"{name}: {m}")


def test_the_parts_of_a_sum_may_come_in_any_order():
    g = torch.Generator().manual_seed(0)
    parts = [torch.randn(50, generator=g).double() * 10.0 ** (i % 9) for i in range(40)]
    forward, ranks = RunningSum(), [RunningSum() for _ in range(3)]
    for i, part in enumerate(parts):
        forward.add(part, 2)
        ranks[i * i % 3].add(part, 2)
    merged = RunningSum()
    for one in reversed(ranks):
        merged.merge(one)
    assert torch.equal(merged.mean(), forward.mean()) and merged.count == 80
    plain = torch.stack(parts).sum(0) / 80
    torch.testing.assert_close(plain, forward.mean())
    assert not torch.equal(
        sum(parts[1:], parts[0]), sum(parts[-2::-1], parts[-1])
    )  # a plain sum cannot do that
