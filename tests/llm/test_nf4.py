"""bitsandbytes' NF4 as the base of adapters: what it stores, that adapters train on it, and how they are merged."""

from __future__ import annotations

import builtins
import importlib.util
import math

import pytest
import torch
from test_qlora import needs_peft, peft
from test_walk import tiny, tokens

from sparsebit.errors import SparsebitError
from sparsebit.llm.training import qlora
from sparsebit.llm.training.nf4 import is_nf4, nf4, nf4_weight

present = importlib.util.find_spec("bitsandbytes") is not None
needs_bitsandbytes = pytest.mark.skipif(not present, reason="bitsandbytes is not installed")
SIZES = {"dim": 64, "hidden": 128, "layers": 2}


def test_without_bitsandbytes_it_is_named(monkeypatch):
    original = builtins.__import__

    def without(name, *args, **kwargs):
        if name.startswith("bitsandbytes"):
            raise ImportError(name)
        return original(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without)
    model = tiny(**SIZES)
    with pytest.raises(SparsebitError, match="nf4"):
        nf4(model)
    assert type(model.layers[0].gate) is torch.nn.Linear  # nothing has happened


def levels() -> torch.Tensor:
    """The 16 levels, from the paper's definition: quantiles of N(0, 1), eight above zero and seven below."""
    offset = (1 - 1 / 30 + 1 - 1 / 32) / 2

    def quantiles(n: int) -> list[float]:
        steps = torch.linspace(offset, 0.5, n, dtype=torch.float64)[:-1].tolist()
        return [
            math.sqrt(2) * float(torch.erfinv(torch.tensor(2 * p - 1, dtype=torch.float64))) for p in steps
        ]

    found = torch.tensor(sorted([*quantiles(9), 0.0, *(-q for q in quantiles(8))]))
    return found / found.max()


@needs_bitsandbytes
def test_the_weight_is_the_nearest_level_of_each_run():
    model = tiny(**SIZES)
    weight = model.layers[0].gate.weight.detach().clone()
    layer = nf4(model).layers[0].gate
    runs = weight.view(-1, 64)
    top = runs.abs().amax(1, keepdim=True)
    nearest = levels()[(runs / top)[..., None].sub(levels()).abs().argmin(-1)] * top
    assert is_nf4(layer) and layer.weight.numel() * 2 == weight.numel()  # two in a byte
    torch.testing.assert_close(
        nf4_weight(layer), nearest.view_as(weight), rtol=0, atol=2e-2 * float(top.max())
    )
    assert all(is_nf4(m) for m in (model.layers[1].attention.q, model.layers[1].down))


@needs_bitsandbytes
@needs_peft
@pytest.mark.parametrize("into", ["float", "grid"])
def test_adapters_train_on_it_and_are_merged(into):
    model, ids = tiny(**SIZES), tokens(1, 4)[0]
    base = nf4(model)
    before = nf4_weight(base.layers[0].gate)
    config = peft().LoraConfig(r=4, lora_alpha=8, target_modules=["q", "v", "gate", "down"])
    torch.manual_seed(0)
    tuned = peft().get_peft_model(base, config)
    optimizer = torch.optim.AdamW([p for p in tuned.parameters() if p.requires_grad], lr=1e-2)
    losses = []
    for _ in range(15):
        logits = tuned.base_model.model(ids)
        loss = torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.8 * losses[0], losses
    tuned.eval()
    expected = tuned.base_model.model(ids).detach()
    gate = tuned.base_model.model.layers[0].gate
    assert torch.equal(nf4_weight(gate.get_base_layer()), before)  # the base has not moved
    delta = gate.get_delta_weight("default").detach()
    merged = qlora.merge(tuned, into=into)
    found, layer = merged.model(ids).detach(), merged.model.layers[0].gate
    if into == "float":
        torch.testing.assert_close(layer.weight, before + delta, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-3)
        assert not any(is_nf4(m) for m in merged.model.modules()) and merged.error < 1e-3
    else:
        assert is_nf4(layer) and merged.error > 0
        lost = (nf4_weight(layer) - before - delta).norm() / delta.norm()
        assert merged.layers["layers.0.gate"]["error"] == pytest.approx(float(lost), rel=1e-3)
