"""One bar: it follows the argument, then the block around it, then the terminal."""

from __future__ import annotations

import sys

import pytest

from sparsebit.utils.progress import bars, tracked, wants_bar


class Terminal:
    def __init__(self, is_terminal):
        self.is_terminal, self.text = is_terminal, ""

    def isatty(self):
        return self.is_terminal

    def write(self, text):
        self.text += text

    def flush(self):
        pass


@pytest.mark.parametrize("is_terminal", [True, False])
def test_who_decides(monkeypatch, is_terminal):
    monkeypatch.setattr(sys, "stderr", Terminal(is_terminal))
    assert wants_bar(None) is is_terminal and wants_bar(True) and not wants_bar(False)
    with bars(False):
        assert not wants_bar(None) and wants_bar(True)
    assert wants_bar(None) is is_terminal


def test_a_bar_inside_a_tracked_loop_is_off(monkeypatch):
    monkeypatch.setattr(sys, "stderr", Terminal(True))
    inside = [wants_bar(None) for _ in tracked([1, 2], None)]
    assert inside == [False, False] and wants_bar(None)
    for _ in tracked([1, 2], None):
        break
    assert wants_bar(None)
    with pytest.raises(ValueError, match="stop"):
        for _ in tracked([1, 2], None):
            raise ValueError("stop")
    assert wants_bar(None)


def test_items_are_handed_on_with_and_without_a_bar(monkeypatch):
    terminal = Terminal(True)
    monkeypatch.setattr(sys, "stderr", terminal)
    assert list(tracked(range(3), True, "calibrating")) == [0, 1, 2] and terminal.text
    assert list(tracked(iter("ab"), False)) == ["a", "b"]
