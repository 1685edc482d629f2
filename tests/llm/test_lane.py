"""A block that stops at a layer and goes on: nothing runs twice, and nothing is taken from before a change."""

from __future__ import annotations

import importlib
from collections import Counter

import pytest
import torch
from test_walk import digest, tiny, tokens
from torch import nn

from sparsebit import llm
from sparsebit.llm.walk import block_walk as walk
from sparsebit.llm.walk import lane as lanes
from sparsebit.llm.walk import relay
from sparsebit.llm.walk.capture import Call
from sparsebit.llm.walk.lane import Lane

run = importlib.import_module("sparsebit.llm.quantize")  # the name is also that of the function
CALL = Call((None,), {}, 0)


class Block(nn.Module):
    """Two layers in a module, attention between them; a layer that runs twice; one that is written to."""

    class Inner(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)

        def forward(self, x):
            y = self.a(x)[:, None]
            return self.b(nn.functional.scaled_dot_product_attention(y, y, y)[:, 0])

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.twice, self.last = self.Inner(), nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x):
        y = self.inner(x)
        y.mul_(2.0)  # in place: what was kept is no longer what inner gave
        y = self.twice(self.twice(torch.tanh(y)))
        return x + self.last(torch.tanh(y))


@pytest.fixture
def block() -> Block:
    torch.manual_seed(0)
    return Block().eval().requires_grad_(False)


def batches() -> list[torch.Tensor]:
    return list(torch.randn(2, 3, 5, 8, generator=torch.Generator().manual_seed(1)))


@pytest.mark.parametrize("room", [0, 700, 2**20])
def test_stops_and_changes_give_what_one_forward_gives(block, monkeypatch, room):
    monkeypatch.setattr(lanes, "ROOM", room)
    names = ["inner.a", "inner.b", "twice", "last"]
    lane = Lane(block, [CALL] * 2, batches(), names)
    for name in names:
        seen = []
        lane.watch(1, [name], lambda n, x: seen.append(x))
        expected = []
        hook = block.get_submodule(name).register_forward_pre_hook(
            lambda m, args: expected.append(args[0].clone())
        )
        block(batches()[1])
        hook.remove()
        assert torch.equal(seen[0], expected[0])
        block.get_submodule(name).weight.mul_(1.5)
        lane.settle([name])
    assert lane.room <= room
    for i, batch in enumerate(batches()):
        assert torch.equal(lane.output(i, last=True), block(batch))
    assert lane.room == room
    assert not any("forward" in vars(m) for m in block.modules())


def test_a_change_behind_its_back_is_told(block):
    lane = Lane(block, [CALL], batches()[:1], ["last"])
    lane.watch(0, ["last"], lambda n, x: None)
    block.twice.weight.mul_(2)
    lane.forget()
    assert torch.equal(lane.output(0), block(batches()[0]))


def test_every_layer_of_a_block_runs_once(tmp_path, monkeypatch):
    """On the quantized and on the float lane, three batches each; before, half of the layers ran two to four times."""
    ran: Counter[int] = Counter()
    linear, solve = nn.Linear.forward, walk._solve_block

    def counted(self, x):
        ran[id(self)] += 1
        return linear(self, x)

    def counting(pair, prefix, job):
        ran.clear()
        found = solve(pair, prefix, job)
        names = dict(pair.block.named_modules())
        most.append({n: ran[id(m)] for n, m in names.items() if type(m) is nn.Linear})
        return found

    most: list[dict[str, int]] = []
    monkeypatch.setattr(nn.Linear, "forward", counted)
    monkeypatch.setattr(walk, "_solve_block", counting)
    llm.quantize(tiny(), tokens(3), save=tmp_path, group_size=16, match_float=True)
    # down runs when the block's output is made
    once = {f"attention.{n}": 3 for n in "qkvo"} | {"gate": 3, "up": 3, "down": 0}
    assert most == [once] * 3


@pytest.mark.parametrize("match_float", [False, True])
def test_without_room_the_bytes_are_the_same(tmp_path, monkeypatch, match_float):
    llm.quantize(tiny(), tokens(), save=tmp_path / "a", group_size=16, match_float=match_float)
    monkeypatch.setattr(lanes, "ROOM", 0)
    llm.quantize(tiny(), tokens(), save=tmp_path / "b", group_size=16, match_float=match_float)
    assert digest(tmp_path / "a") == digest(tmp_path / "b")


def test_long_work_shows_how_far_it_is(tmp_path, monkeypatch):
    shown = []

    def note(steps, progress, label):
        found = list(steps)
        shown.append((label, progress, len(found)))
        return iter(found)

    for module in (run, relay):
        monkeypatch.setattr(module, "tracked", note)
    llm.quantize(
        tiny(), tokens(), save=tmp_path, group_size=16, candidate_bits=(2, 4), average_bits=3.0, progress=True
    )
    # six sequences are too few to hold some back: three batches to fit on, the same three to measure on
    assert shown == [("capturing", True, 6), ("measuring", True, 21), ("quantizing", True, 3)]
