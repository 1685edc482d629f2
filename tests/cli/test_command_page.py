"""Every console line of docs/howto/command-line.md is run, in order; lines of output shown there really come."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from llm_files import tiny_llama
from safetensors.torch import save_file

PAGE = Path(__file__).parents[2] / "docs/howto/command-line.md"


def blocks(kind: str) -> list[str]:
    return re.findall(rf"^```{kind}\n(.*?)^```", PAGE.read_text("utf-8"), re.MULTILINE | re.DOTALL)


def commands() -> list[tuple[str, list[str]]]:
    """Command, and the lines that are shown below it."""
    found: list[tuple[str, list[str]]] = []
    for line in "".join(blocks("console")).splitlines():
        if line.startswith("$ "):
            found.append((line[2:], []))
        else:
            found[-1][1].append(line)
    return found


def follow(sparsebit, lines: list[tuple[str, list[str]]]) -> None:
    for command, shown in lines:
        assert command.startswith("sparsebit ")
        done = sparsebit(command.removeprefix("sparsebit "))
        assert done.code == 0, (command, done.err)
        missing = [line for line in shown if line not in (done.out + done.err).splitlines()]
        assert not missing, (command, missing, done.out)


def test_lines_about_language_models(sparsebit, tmp_path, monkeypatch):
    if importlib.util.find_spec("transformers") is None:
        pytest.skip("transformers is not installed (pip install 'sparsebit[llm]')")
    monkeypatch.chdir(tiny_llama(tmp_path))
    (tmp_path / "model").rename("llama")
    lines = [line for line in commands() if line[0].startswith("sparsebit llm ")]
    assert len(lines) >= 4
    follow(sparsebit, lines)


@pytest.mark.slow
def test_the_page_runs(sparsebit, tmp_path, monkeypatch):
    pytest.importorskip("onnxruntime")
    pytest.importorskip("sklearn")
    image = pytest.importorskip("PIL.Image")
    from sparsebit.cli import demo
    from sparsebit.cli.inputs.models import load_model

    monkeypatch.chdir(tmp_path)
    train = demo.train
    monkeypatch.setattr(demo, "train", lambda net, x, y, epochs=1: train(net, x[:256], y[:256], 1))
    (tmp_path / "net.py").write_text("\n\n".join(blocks("python")[:2]))
    save_file(load_model("net.py:build").state_dict(), "net.safetensors")
    torch.manual_seed(0)
    np.save("calibration.npy", torch.randn(24, 3, 16, 16).numpy())
    (tmp_path / "images").mkdir()
    for i in range(16):
        pixels = np.random.default_rng(i).integers(0, 255, (20, 24, 3), dtype=np.uint8)
        image.fromarray(pixels).save(f"images/{i}.png")
    follow(sparsebit, [line for line in commands() if not line[0].startswith("sparsebit llm ")])
    scope: dict[str, object] = {}
    for block in blocks("python"):
        exec(block, scope)
    assert isinstance(scope["small"], torch.nn.Module)


def test_the_page_names_every_command():
    from sparsebit.cli.app import commands as registered

    names = {name.split()[0] for name in registered()}
    assert len(names) >= 10 and names == {command.split()[1] for command, _ in commands()}
