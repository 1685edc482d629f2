"""The table of patches: every row is needed and tested, and other threads do not notice a trace."""

from __future__ import annotations

import builtins
import re
import threading
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence
from torch.utils.checkpoint import CheckpointFunction

from sparsebit.graph.trace import patches
from sparsebit.graph.trace.from_module import trace
from sparsebit.graph.trace.patches import FLAGS, PATCHES, UNRECORDED
from sparsebit.graph.trace.tracer import LeafTracer

X = torch.linspace(-1, 1, 12).reshape(3, 4)


class Expands(nn.Module):
    def forward(self, x):
        return x + torch.ones(1, 4).expand(x.shape[0], 4)


class NewTensor(nn.Module):
    def __init__(self, name: str):
        super().__init__()
        self.name = name

    def forward(self, x):
        made = getattr(torch.ones(1), self.name)(x.shape[0], 4)
        return x + 0 * torch.zeros_like(made)


class Makes(nn.Module):
    def __init__(self, name: str):
        super().__init__()
        self.name = name

    def forward(self, x):
        return x + 0 * torch.zeros_like(getattr(torch, self.name)(x.shape[0], 4))


class Limits(nn.Module):
    def forward(self, x):
        return x * torch.iinfo(x.long().dtype).max


NETS = {
    "iinfo": Limits,
    "expand": Expands,
    **{name: lambda name=name: NewTensor(name) for name in ("new_empty", "new_ones", "new_zeros")},
    **{name: lambda name=name: Makes(name) for name in ("empty", "ones", "rand", "randn", "zeros")},
}


@pytest.mark.parametrize("name", NETS)
def test_every_function_of_the_table_is_recorded(name, monkeypatch):
    model = NETS[name]().eval()
    gm = trace(model, LeafTracer(), ((X,), {}))
    assert not gm.meta["islands"]
    for x in (X, X[:1]):
        torch.testing.assert_close(gm(x), model(x))
    rest = tuple(row for row in PATCHES if row.name != name)
    assert len(rest) == len(PATCHES) - 1
    monkeypatch.setattr(patches, "PATCHES", rest)
    assert trace(model, LeafTracer(), ((X,), {})).meta["islands"]  # the row is needed


def test_every_row_names_its_test_and_its_reason():
    folder = Path(__file__).parents[1]
    tests = set(re.findall(r"def (test_\w+)", "".join(p.read_text() for p in folder.rglob("test_*.py"))))
    for row in (*PATCHES, *FLAGS, *UNRECORDED):
        assert row.test in tests, f"{row.owner}.{row.name}: there is no test {row.test}"
        assert len(row.why) > 10


def test_an_error_inside_leaves_no_patch():
    before = (torch.arange, Tensor.expand, builtins.len, pack_padded_sequence.__code__)
    apply = CheckpointFunction.apply.__func__
    with pytest.raises(RuntimeError, match="stop"), LeafTracer().prepared_torch():
        raise RuntimeError("stop")
    assert before == (torch.arange, Tensor.expand, builtins.len, pack_padded_sequence.__code__)
    assert CheckpointFunction.apply.__func__ is apply


class Meanwhile(nn.Module):
    """Runs other models in another thread during each of its traces."""

    def __init__(self, found: list[str]):
        super().__init__()
        self.found = found
        self.p = 0.5

    def forward(self, x):
        thread = threading.Thread(target=run_elsewhere, args=(self.found,))
        thread.start()
        thread.join()
        return torch.nn.functional.dropout(x, self.p, self.training)

    def __deepcopy__(self, memo):
        return Meanwhile(self.found)


def run_elsewhere(found: list[str]) -> None:
    try:
        lstm = nn.LSTM(4, 3, dropout=0.0).eval()
        assert lstm.training is False
        assert len(lstm(torch.zeros(2, 1, 4))) == 2
        again = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5)).eval()
        assert again(torch.ones(1, 4)).shape == (1, 4)
        x = torch.ones(2, 4, requires_grad=True)
        torch.utils.checkpoint.checkpoint(again, x, use_reentrant=True).sum().backward()
        assert x.grad is not None
        found.append("ran")
    except BaseException as error:
        found.append(f"{type(error).__name__}: {error}")


def test_a_model_in_another_thread_runs_as_ever():
    """An LSTM in eval mode failed in a server while another thread traced a model: `training` was no bool."""
    found: list[str] = []
    model = Meanwhile(found).eval()
    gm = trace(model, LeafTracer(), ((X,), {}))
    assert not gm.meta["islands"]
    assert len(found) >= 3  # the trace, the trace with flags, and the model itself
    assert set(found) == {"ran"}
    assert torch.nn.Dropout in {type(m) for m in gm.modules()}
