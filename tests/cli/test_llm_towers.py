"""Encoder-decoders and models that see or hear, by the command line."""

from __future__ import annotations

import importlib
import importlib.util
import json
import sys
from pathlib import Path

import numpy as np
import pytest

for package in ("transformers", "compressed_tensors", "accelerate"):
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"{package} is not installed (pip install sparsebit[llm])", allow_module_level=True)
sys.path[:0] = [str(Path(__file__).resolve().parents[1] / part) for part in ("llm", "zoo")]
__import__("zoo_shim").install()
tiny = importlib.import_module("tiny_transformers")


def saved(name: str, folder: Path) -> Path:
    tiny.ARCHITECTURES[name]()[0].save_pretrained(folder / "model")
    return folder / "model"


def tokens(path: Path, length: int = 24) -> Path:
    np.save(path, np.random.default_rng(0).integers(3, 80, (40, length)))
    return path


def quantized(done) -> dict:
    assert done.code == 0, done.err
    facts = json.loads(done.out)
    assert facts["readers"][0]["reader"] == "transformers" and facts["readers"][0]["state"] == "runs"
    return facts


@pytest.mark.parametrize("name", ["BartForConditionalGeneration", "LlavaForConditionalGeneration"])
def test_text_for_models_with_two_towers(name, tmp_path, sparsebit):
    """An encoder-decoder reads the first half and writes the second; both towers are fitted and measured."""
    model, data = saved(name, tmp_path), tokens(tmp_path / "t.npy")
    done = sparsebit(f"llm quantize {model} --data {data} --refine 0 -o {tmp_path / 'out'} --json")
    facts = quantized(done)
    assert any("encoder" in layer for layer in facts["layers"]) == name.startswith("Bart")
    assert facts["measured"]["tokens"] > 0


def test_batches_of_a_processor(tmp_path, sparsebit):
    name = "WhisperForConditionalGeneration"
    model, data = saved(name, tmp_path), tmp_path / "data"
    data.mkdir()
    for i in range(8):
        batch = {key: value.numpy() for key, value in tiny.batch_of(name, i).items()}
        np.savez(data / f"{i}.npz", **batch)
    done = sparsebit(f"llm quantize {model} --data {data} --refine 0 -o {tmp_path / 'out'} --json")
    assert any("encoder" in layer for layer in quantized(done)["layers"])


@pytest.mark.parametrize(("words", "said"), [
    ("quantize {model} --data {short} -o {out}", "the model does not run on the first one, which is input_ids, labels"),
    ("quantize {model} --data {broken} -o {out}", "broken.npz: cannot be read"),
    ("eval {model} --data {short}", "WhisperForConditionalGeneration reads one text and writes another"),
])  # fmt: skip
def test_mistakes_are_one_line(words, said, tmp_path, sparsebit):
    names = {"model": saved("WhisperForConditionalGeneration", tmp_path), "out": tmp_path / "out"}
    names |= {"short": tokens(tmp_path / "short.npy", 8), "broken": tmp_path / "broken.npz"}
    names["broken"].write_bytes(b"nothing")
    done = sparsebit("llm " + words.format(**names))
    lines = done.err.strip().splitlines()
    assert done.code == 2 and said in lines[-1] and len(lines) == 1, done.err
    assert not names["out"].exists()
