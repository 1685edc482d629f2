"""Blocks are found, run one at a time as the model runs them, and a killed run ends in the same bytes."""

from __future__ import annotations

import copy
import hashlib
import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch
from torch import nn

from llm_assets import Llama, Sizes
from sparsebit import llm
from sparsebit.errors import CalibrationError, ConfigError, SparsebitError
from sparsebit.llm.models.blocks import linears_of
from sparsebit.llm.walk.capture import capture
from sparsebit.llm.walk.lane import Lane
from sparsebit.llm.walk.statistics import collect, sharing

SMALL = Sizes(dim=32, hidden=48, layers=3, heads=4, kv_heads=2, vocab=64, length=32)


def tiny(**changes) -> Llama:
    torch.manual_seed(1)
    return Llama(Sizes(**{**vars(SMALL), **changes})).eval()


def tokens(n=3, rows=2, length=16) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(2)
    return [torch.randint(0, 64, (rows, length), generator=generator) for _ in range(n)]


class Strange(nn.Module):
    """Blocks that return tuples, take the hidden state by name, differ in their mask, and hold experts in a list."""

    class Block(nn.Module):
        def __init__(self, wide: bool) -> None:
            super().__init__()
            self.wide = wide
            self.experts = nn.ModuleList(nn.Linear(16, 16) for _ in range(3))
            self.out = nn.Linear(16, 16)

        def forward(self, *, hidden_states, mask, cache=None):
            y = sum(e(hidden_states * mask) for e in self.experts[:2])  # the third expert is never chosen
            return hidden_states + self.out(torch.tanh(y)), cache

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(64, 16)
        self.side = nn.Sequential(nn.Linear(16, 16), nn.ReLU())
        self.decoder = nn.ModuleDict({"blocks": nn.ModuleList(self.Block(i % 2 == 0) for i in range(4))})
        self.head = nn.Linear(16, 64)

    def forward(self, ids, use_cache=True):
        x = self.embed(ids) + self.side(self.embed(ids))
        for block in self.decoder["blocks"]:
            x, _ = block(hidden_states=x, mask=1.0 if block.wide else 0.5, cache={} if use_cache else None)
        return self.head(x)


# -- what is found -----------------------------------------------------------------------------------------
def test_blocks_are_found_and_told():
    found = llm.find_blocks(tiny())
    assert found.path == "layers" and len(found) == 3 and len(found.names()) == 21
    assert "3 blocks in 'layers', 21 layers" in str(found) and "float: embed.weight (2,048)" in str(found)
    assert llm.find_blocks(Strange()).path == "decoder.blocks"  # not the lists of experts in it


def test_a_list_can_be_named_and_a_wrong_one_is_refused():
    with pytest.raises(ConfigError, match=r"'layer' is not a ModuleList of this model; there are: layers"):
        llm.find_blocks(tiny(), "layer")
    with pytest.raises(ConfigError, match="no ModuleList of decoder blocks"):
        llm.find_blocks(nn.Conv2d(3, 3, 3))


# -- one block at a time -----------------------------------------------------------------------------------
@pytest.mark.parametrize("build", [tiny, Strange])
def test_blocks_run_alone_as_they_run_in_the_model(build):
    model, batches = build().eval(), tokens()
    blocks = model.get_submodule(llm.find_blocks(model).path)
    before = copy.deepcopy(model.state_dict())
    outputs: list[torch.Tensor] = []
    handle = blocks[-1].register_forward_hook(
        lambda m, a, out: outputs.append(out[0] if isinstance(out, tuple) else out)
    )
    with torch.no_grad():
        for batch in batches:
            model(batch)
    handle.remove()
    captured = capture(model, blocks, batches, copy.deepcopy(blocks[0]))
    hidden = captured.hidden
    with torch.no_grad():
        for block, calls in zip(blocks, captured.calls):
            hidden = [call.run(block, h) for call, h in zip(calls, hidden)]
    for ours, theirs in zip(hidden, outputs):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=0)
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())
    assert not any("forward" in vars(block) for block in blocks)


def test_statistics_are_the_second_moments_of_all_batches():
    model, batches = tiny(), tokens()
    captured = capture(model, model.layers, batches, copy.deepcopy(model.layers[0]))
    block, calls = model.layers[0], captured.calls[0]
    names = list(linears_of(block))
    groups = sharing(Lane(block, calls, captured.hidden), names)
    assert groups == [
        ["attention.q", "attention.k", "attention.v"],
        ["attention.o"],
        ["gate", "up"],
        ["down"],
    ]
    found = collect(Lane(block, calls, captured.hidden, names), groups)
    seen: dict[str, list[torch.Tensor]] = {name: [] for name in names}
    handles = [
        block.get_submodule(n).register_forward_hook(lambda m, a, o, n=n: seen[n].append(a[0].flatten(0, 1)))
        for n in names
    ]
    with torch.no_grad():
        for batch in batches:
            model(batch)
    for handle in handles:
        handle.remove()
    for name in names:
        x = torch.cat(seen[name]).double()
        torch.testing.assert_close(found[name].hessian.double(), x.T @ x, rtol=1e-4, atol=1e-4)
        assert found[name].tokens == len(x) and found[name].cross is None
    other = copy.deepcopy(block)  # a float twin that sees other inputs
    moved = [h + 0.1 for h in captured.hidden]
    lanes = Lane(block, calls, captured.hidden), Lane(other, calls, moved)
    cross = collect(lanes[0], [["attention.q"]], lanes[1])["attention.q"].cross
    x = torch.cat([block.norm1(h).flatten(0, 1) for h in captured.hidden])
    y = torch.cat([block.norm1(h).flatten(0, 1) for h in moved])
    torch.testing.assert_close(cross, (y - x).T @ x, rtol=1e-3, atol=1e-3)


def test_the_users_model_is_left_alone(tmp_path):
    model = tiny()
    before = copy.deepcopy(model.state_dict())
    llm.quantize(model, tokens(), save=tmp_path, group_size=16)
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())
    assert type(model.layers[0].gate) is nn.Linear


def test_a_layer_that_no_token_reaches_is_rounded_and_told(tmp_path):
    model = Strange().eval()
    report = llm.quantize(model, tokens(), save=tmp_path, group_size=16)
    assert "no calibration token reached" in report.layers["decoder.blocks.0.experts.2"]["note"]
    assert "decoder.blocks.0.experts.2: no calibration token" in str(report)
    loaded = llm.load(tmp_path, model)
    assert isinstance(loaded.decoder["blocks"][0].experts[2], llm.QuantLinear)
    out, expected = loaded(tokens()[0]), model(tokens()[0])
    assert (out - expected).square().mean() < 0.05 * expected.square().mean()


# -- resume --------------------------------------------------------------------------------------------------
def digest(folder: Path) -> dict[str, str]:
    return {p.name: hashlib.sha256(p.read_bytes()).hexdigest() for p in sorted(folder.iterdir())}


@pytest.mark.parametrize("match_float", [False, True])
@pytest.mark.parametrize("mixed", [False, True])
def test_an_interrupted_run_ends_in_the_same_bytes(tmp_path, monkeypatch, mixed, match_float):
    options = {"group_size": 16, "bits": 3, "match_float": match_float}
    if mixed:
        options |= {"candidate_bits": (2, 4), "average_bits": 3.0}
        del options["bits"]
    llm.quantize(tiny(), tokens(), save=tmp_path / "whole", **options)
    from sparsebit.llm.checkpoints import store

    original = store.Store.write
    monkeypatch.setattr(
        store.Store, "write", lambda self, i, *rest: original(self, i, *rest) if i < 2 else 1 / 0
    )
    with pytest.raises(ZeroDivisionError):
        llm.quantize(tiny(), tokens(), save=tmp_path / "parts", **options)
    monkeypatch.undo()
    half = digest(tmp_path / "parts")
    assert "config.json" not in half and "model-block-00001.safetensors" in half
    with pytest.raises(ConfigError, match="call it again"):
        llm.load(tmp_path / "parts", tiny())
    llm.quantize(tiny(), tokens(), save=tmp_path / "parts", **options)
    assert digest(tmp_path / "parts") == digest(tmp_path / "whole")


def test_killed_in_the_middle(tmp_path):
    """kill -9 after the second block, then again: the same files as without."""
    code = textwrap.dedent("""
        import os, signal, sys
        import torch
        torch.set_num_threads(1)
        from test_walk import tiny, tokens
        from sparsebit import llm
        from sparsebit.llm.checkpoints.store import Store
        write = Store.write
        def killing(self, block, *rest):
            write(self, block, *rest)
            if block == 1:
                os.kill(os.getpid(), signal.SIGKILL)
        if sys.argv[2] == "kill":
            Store.write = killing
        llm.quantize(tiny(), tokens(), save=sys.argv[1], group_size=16)
    """)
    here = Path(__file__).resolve().parent
    paths = [here, here.parent, here.parent.parent / "benchmarks", here.parent.parent / "src"]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, paths)), "OMP_NUM_THREADS": "1"}

    def run(folder: str, how: str) -> int:
        command = [sys.executable, "-c", code, str(tmp_path / folder), how]
        return subprocess.run(command, env=environment, capture_output=True).returncode

    assert run("whole", "on") == 0
    assert run("parts", "kill") == -signal.SIGKILL
    assert not (tmp_path / "parts" / "config.json").exists()
    assert run("parts", "on") == 0
    assert digest(tmp_path / "parts") == digest(tmp_path / "whole")


def test_a_folder_never_mixes_two_runs(tmp_path):
    llm.quantize(tiny(), tokens(), save=tmp_path, group_size=16)
    with pytest.raises(ConfigError, match=r"holds another run \(other bits\)"):
        llm.quantize(tiny(), tokens(), save=tmp_path, group_size=16, bits=3)
    with pytest.raises(ConfigError, match=r"other inputs"):
        llm.quantize(tiny(), tokens(2), save=tmp_path, group_size=16)
    other = tiny()
    other.layers[2].down.weight.data *= 1.5
    with pytest.raises(ConfigError, match=r"other weights"):
        llm.quantize(other, tokens(), save=tmp_path, group_size=16)
    before = digest(tmp_path)
    llm.quantize(tiny(), tokens(), save=tmp_path, group_size=16)  # all is there: nothing changes
    assert digest(tmp_path) == before


# -- memory --------------------------------------------------------------------------------------------------
def test_memory_does_not_grow_with_the_layers(tmp_path, monkeypatch):
    """Float blocks alive at once: one and its twin, however many there are."""
    import gc

    from sparsebit.llm.walk import block_walk as walk

    most = []
    original = walk._solve_block

    def counting(lanes, prefix, job):
        gc.collect()
        most.append(sum(type(o) is type(lanes.block) for o in gc.get_objects()))
        return original(lanes, prefix, job)

    monkeypatch.setattr(walk, "_solve_block", counting)
    for layers in (2, 6):
        model = tiny(layers=layers)
        llm.quantize(model, tokens(1), save=tmp_path / str(layers), group_size=16, match_float=True)
        assert max(most) <= layers + 3, (
            most
        )  # the user's own, the copy, its float twin, the one for capturing
        most.clear()


@pytest.mark.parametrize(
    "options", [{}, {"match_float": True}, {"candidate_bits": (2, 4), "average_bits": 3.0}, {"method": "awq"}]
)
def test_activations_on_disk_give_the_same_bytes(tmp_path, monkeypatch, options):
    from sparsebit.llm.walk.spill import Spilled

    held = []
    write = Spilled.__setitem__
    monkeypatch.setattr(Spilled, "__setitem__", lambda self, i, v: (held.append(i), write(self, i, v))[1])
    llm.quantize(tiny(), tokens(6), save=tmp_path / "a", group_size=16, **options)
    assert not held
    llm.quantize(tiny(), tokens(6), save=tmp_path / "b", group_size=16, spill=tmp_path / "spilled", **options)
    assert digest(tmp_path / "a") == digest(tmp_path / "b")
    assert set(held) == set(range(7)) and not list((tmp_path / "spilled").iterdir())  # gone again


# -- errors --------------------------------------------------------------------------------------------------
def test_errors_say_what_to_do(tmp_path):
    with pytest.raises(CalibrationError, match="needs calibration data"):
        llm.quantize(tiny(), save=tmp_path / "a")
    with pytest.raises(CalibrationError, match="`batches` is empty"):
        llm.quantize(tiny(), [], save=tmp_path / "b")
    with pytest.raises(ConfigError, match="gptq has no such option; it has: damping"):
        llm.quantize(tiny(), tokens(), save=tmp_path / "c", dampening=0.1)
    with pytest.raises(ConfigError, match="candidate_bits and average_bits"):
        llm.quantize(tiny(), tokens(), save=tmp_path / "d", average_bits=3.0)
    with pytest.raises(ConfigError, match="bits: must be among"):
        llm.quantize(tiny(), tokens(), save=tmp_path / "e", bits=5)
    with pytest.raises(KeyError, match="unknown llm method 'gtpq'; did you mean gptq"):
        llm.quantize(tiny(), tokens(), save=tmp_path / "f", method="gtpq")
    with pytest.raises(ConfigError, match=r"config\.json"):
        llm.quantize(tmp_path / "none", tokens(), save=tmp_path / "g")
    broken = tiny()
    broken.layers[1].gate.weight.data[0, 0] = float("nan")
    with pytest.raises(SparsebitError, match=r"layers\.1"):
        llm.quantize(broken, tokens(), save=tmp_path / "h")
