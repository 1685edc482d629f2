"""A rotated model gives what the float model gave; what cannot be rotated is refused."""

from __future__ import annotations

import copy
import json

import pytest
import torch
from test_walk import Strange, digest, tiny, tokens
from torch import nn

from sparsebit import llm
from sparsebit.errors import CalibrationError, ConfigError
from sparsebit.llm.models.sources import InMemory
from sparsebit.llm.transforms.rotate import Rotated
from sparsebit.llm.walk.capture import capture
from sparsebit.numeric.solvers.rotation import hadamard, rotation


def test_hadamard_is_sylvesters():
    by_hand = torch.tensor([[1, 1, 1, 1], [1, -1, 1, -1], [1, 1, -1, -1], [1, -1, -1, 1]]) / 2
    assert torch.equal(hadamard(4), by_hand.double())


@pytest.mark.parametrize("width", [1, 7, 32, 48, 576])
def test_rotations_are_orthogonal_and_spread(width):
    q = rotation(width)
    torch.testing.assert_close(q @ q.T, torch.eye(width, dtype=torch.float64), rtol=0, atol=1e-12)
    assert torch.equal(q, rotation(width)) and (width == 1 or not torch.equal(q, rotation(width, seed=1)))
    if width == 576:
        assert q.abs().max() < 0.13  # one outlier becomes 576 small values


def messy(**changes) -> nn.Module:
    """Gains that are not 1, as trained models have."""
    model = tiny(**changes)
    for module in model.modules():
        if type(module).__name__ == "RMSNorm":
            module.weight.data.uniform_(0.5, 2.0)
    return model


def rotated_model(model, batches):
    source = Rotated(InMemory(model))
    found = capture(source.model, source.blocks, batches, source.inner.block(0))
    source.prove(found, batches)
    whole = copy.deepcopy(source.model)
    for i in range(len(whole.layers)):
        whole.layers[i] = source.block(i)
    return whole


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-4), (torch.float64, 1e-9)])
@pytest.mark.parametrize("dim", [32, 24])
def test_the_float_output_stays(dtype, tolerance, dim):
    model = messy(dim=dim).to(dtype)
    before = copy.deepcopy(model.state_dict())
    turned = rotated_model(model, tokens())
    with torch.no_grad():
        expected, found = model(tokens()[0]), turned(tokens()[0])
    assert (found - expected).abs().max() < tolerance * expected.abs().max()
    assert not torch.allclose(turned.layers[0].gate.weight, model.layers[0].gate.weight, atol=0.1)
    assert (turned.layers[1].norm2.weight == 1).all() and (turned.norm.weight == 1).all()
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())
    assert model.head.weight is model.embed.weight


def test_quantized_and_reloaded(tmp_path):
    model, batches = messy(), tokens()
    for layer in model.layers:  # weights of a few channels are large: they take the range of their rows
        for linear in (layer.attention.q, layer.attention.k, layer.attention.v, layer.gate, layer.up):
            linear.weight.data[:, [3, 17]] *= 8
    expected = model(batches[0])
    error = {}
    for rotate in (False, True):
        out = tmp_path / str(rotate)
        llm.quantize(
            model, batches, save=out, method="rtn", bits=4, group_size=-1, rotate=rotate, clip="minmax"
        )
        with torch.no_grad():
            error[rotate] = float((llm.load(out, model)(batches[0]) - expected).square().mean())
    assert error[True] < error[False]
    loaded = llm.load(tmp_path / "True", model)
    assert loaded.head.weight is not loaded.embed.weight
    where = json.loads((tmp_path / "True" / "model.safetensors.index.json").read_text())["weight_map"]
    assert {"embed.weight", "head.weight"} <= set(where)
    llm.quantize(model, batches, save=tmp_path / "8", bits=8, group_size=16, rotate=True)
    close = llm.load(tmp_path / "8", model)(batches[0])
    assert (close - expected).abs().max() < 0.05 * expected.abs().max()
    before = digest(tmp_path / "8")
    llm.quantize(model, batches, save=tmp_path / "8", bits=8, group_size=16, rotate=True)
    assert digest(tmp_path / "8") == before


class WithLayerNorm(nn.Module):
    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm, self.up, self.down = nn.LayerNorm(16), nn.Linear(16, 32), nn.Linear(32, 16)

        def forward(self, x):
            return x + self.down(torch.relu(self.up(self.norm(x))))

    def __init__(self, norm):
        super().__init__()
        self.embed, self.norm, self.head = nn.Embedding(64, 16), norm, nn.Linear(16, 64)
        self.blocks = nn.ModuleList(self.Block() for _ in range(2))

    def forward(self, tokens):
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def test_what_cannot_be_rotated_is_refused(tmp_path):
    ran = []

    def run(model, batches=None):
        ran.append(model)
        llm.quantize(
            model,
            tokens() if batches is None else batches,
            save=tmp_path / str(len(ran)),
            group_size=16,
            rotate=True,
        )

    with pytest.raises(ConfigError, match="norm is a LayerNorm, which takes the mean away"):
        run(WithLayerNorm(nn.LayerNorm(16)))
    with pytest.raises(ConfigError, match=r"blocks\.0\.norm is a LayerNorm"):
        run(WithLayerNorm(nn.RMSNorm(16)))
    with pytest.raises(ConfigError, match="0 norms outside"):
        run(Strange())
    with pytest.raises(CalibrationError, match="empty"):
        run(tiny(), [])
    model = tiny()

    class Peek(type(model.layers[0])):
        def forward(self, x, angles):
            return super().forward(x, angles) + x[..., :1]  # reads the stream past the norms

    model.layers[1].__class__ = Peek
    with pytest.raises(ConfigError, match=r"layers\.1 returns a different output when it is rotated"):
        run(model)
