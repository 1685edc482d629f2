"""Bars of `sparsebit.prune`: for batches and for the search of a budget, where they are asked for."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import sparsebit
from sparsebit.graph.run import batches
from sparsebit.sparse.choose import allocate
from sparsebit.utils import progress as bars


def small() -> nn.Module:
    head = (nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 4))
    return nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), *head)


@pytest.mark.parametrize("progress", [None, True, False])
def test_it_is_handed_on(monkeypatch, progress):
    asked = []

    def tracked(items, wanted, label="calibrating"):
        if label == "pruning":  # fitting has a bar of its own, and none for its batches
            asked.append(wanted)
        return bars.tracked(items, False, label)

    monkeypatch.setattr(allocate, "tracked", tracked)
    monkeypatch.setattr(batches, "tracked", tracked)
    x = torch.randn(2, 3, 8, 8)
    sparsebit.prune(small(), x, macs=0.5, batches=[x], progress=progress)
    assert len(asked) >= 3 and set(asked) == {progress}  # batches twice, and the budget


def test_a_bar_is_shown(capfd, monkeypatch):
    torch.manual_seed(0)
    model, x = small(), torch.randn(2, 3, 8, 8)
    expected = sparsebit.prune(model, x, params=0.5, progress=False)
    assert capfd.readouterr().err == ""
    monkeypatch.setenv("FORCE_COLOR", "1")  # rich writes as to a terminal
    got = sparsebit.prune(model, x, params=0.5, progress=True)
    assert "pruning" in capfd.readouterr().err
    assert torch.equal(got(x), expected(x))
