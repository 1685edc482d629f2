"""Adapters on a packed model under FSDP2: two gloo processes, started by torchrun, train as one process does.

Run as a script, this file is what each of them does.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).resolve().parent))
from test_qlora import adapted, folder, needs_peft, peft, tokens

from sparsebit.llm import QuantLinear

__all__ = ["folder"]  # the fixture: a packed checkpoint
STEPS, RANKS = 3, 2


def train(model: nn.Module, rows: torch.Tensor) -> list[float]:
    """Plain steps; FSDP averages gradients over processes, so equal parts of a batch give the batch's."""
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.5)
    losses = []
    for _ in range(STEPS):
        loss = model(input_ids=rows, labels=rows).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def trained(model: nn.Module) -> dict[str, torch.Tensor]:
    whole = {
        n: getattr(p, "full_tensor", lambda p=p: p)() for n, p in model.named_parameters() if p.requires_grad
    }
    return {name: tensor.detach().clone() for name, tensor in whole.items()}


@needs_peft
@pytest.mark.slow
@pytest.mark.skipif(not torch.distributed.is_available(), reason="torch was built without distributed")
def test_two_processes_train_as_one_does(folder, tmp_path):
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(RANKS)]
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    command += [__file__, str(folder), str(tmp_path / "found.pt")]
    done = subprocess.run(command, capture_output=True, text=True, env=env, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    found = torch.load(tmp_path / "found.pt")
    model = adapted(folder, target_modules=["q_proj", "down_proj"])
    before = trained(model)
    losses = train(model, tokens())
    expected = trained(model)
    assert found["losses"] == pytest.approx(losses, rel=1e-5) and losses[-1] < losses[0]
    assert found["weights"].keys() == expected.keys() and len(expected) == 8
    for name, weight in expected.items():
        torch.testing.assert_close(found["weights"][name], weight, rtol=1e-4, atol=1e-6)
    assert not any(torch.equal(before[n], w) for n, w in expected.items() if "lora_B" in n)
    assert found["sharded"] == len(expected)  # each process held a part of every adapter
    assert found["packed"] == [14] * RANKS  # and all packed layers, as they were


def work(checkpoint: str, out: str) -> None:
    import torch.distributed as dist
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import DTensor

    peft()  # with the shim, before transformers is imported
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    mesh = dist.init_device_mesh("cpu", (RANKS,))
    model = adapted(checkpoint, target_modules=["q_proj", "down_proj"])
    before = {n: m.packed.clone() for n, m in model.named_modules() if isinstance(m, QuantLinear)}
    for block in model.get_base_model().model.layers:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    adapters = [p for p in model.parameters() if p.requires_grad]
    sharded = sum(isinstance(p, DTensor) and p.to_local().numel() < p.numel() for p in adapters)
    losses = torch.tensor(train(model, tokens().chunk(RANKS)[rank]))
    dist.all_reduce(losses)
    weights = trained(model)
    same = [torch.equal(m.packed, before[n]) for n, m in model.named_modules() if n in before]
    packed: list[int] = [0] * RANKS
    dist.all_gather_object(packed, sum(same))
    if rank == 0:
        about = {"weights": weights, "sharded": sharded, "packed": packed}
        torch.save({"losses": (losses / RANKS).tolist(), **about}, out)
    dist.destroy_process_group()


if __name__ == "__main__":
    torch.set_num_threads(1)
    work(*sys.argv[1:])
