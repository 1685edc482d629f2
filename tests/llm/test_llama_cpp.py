"""GGUF files in llama.cpp itself: logits, greedy tokens and token ids are those of transformers.

Needs llama-cpp-python (pip install llama-cpp-python builds it in some minutes); without it the module is skipped.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from sparsebit import llm
from sparsebit.errors import ExportError
from sparsebit.llm.gguf import ARCHITECTURES as KNOWN
from sparsebit.llm.gguf import export_gguf
from sparsebit.llm.gguf.pretokenizers import KNOWN as CUTS
from sparsebit.llm.gguf.pretokenizers import SIMPLER, cut_of
from sparsebit.llm.gguf.runner import ask_llama_cpp

for package in ("transformers", "gguf", "llama_cpp"):
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"{package} is not installed", allow_module_level=True)
sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).resolve().parents[1] / "zoo")]
__import__("zoo_shim").install()
files = importlib.import_module("gguf_files")
tiny = importlib.import_module("tiny_transformers")
ARCHITECTURES = tiny.ARCHITECTURES
# what llama.cpp has built in: no windows, normed weights of experts, no shared heads
CHANGES = {
    "MistralForCausalLM": {"sliding_window": None},
    "Qwen3MoeForCausalLM": {"norm_topk_prob": True},
    "OlmoeForCausalLM": {"num_key_value_heads": 4},
}
FULL = {"layer_types": ["full_attention"] * 2, "sliding_window": None, "sliding_window_pattern": None}
MORE = {
    "Arcee": {}, "Cohere2": {"sliding_window": 8, "head_dim": 16}, "Ernie4_5": {"head_dim": 16}, "Exaone4": FULL,
    "Glm4": {"head_dim": 16}, "Ministral": {"head_dim": 16, "sliding_window": 4096}, "Nemotron": {},
    "Olmo3": {"sliding_window": 8}, "SeedOss": {"head_dim": 16},
}  # fmt: skip
ROWS = ARCHITECTURES | {
    f"{name}ForCausalLM": tiny.Architecture(name, "dense", {**tiny.SIZES, **config})
    for name, config in MORE.items()
}


def build(name: str, **changes) -> torch.nn.Module:
    """A tiny model with logits that differ, and with norms and biases that say something."""
    transformers = importlib.import_module("transformers")
    row = ROWS[name]
    torch.manual_seed(0)
    config = getattr(transformers, row.settings or f"{row.name}Config")(**{**row.config, **changes})
    return lively(getattr(transformers, name)(config).eval())


def lively(model: torch.nn.Module) -> torch.nn.Module:
    torch.manual_seed(3)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(torch.randn_like(parameter) * 0.1)
            else:
                parameter.mul_(3)
    return model


def difference(model: torch.nn.Module, path: Path, places=np.max) -> float:
    """The largest difference of logits at any place (or at the middle one), as a share of the largest logit."""
    torch.manual_seed(2)
    ids = tiny.words()[0].tolist()
    with torch.no_grad():
        want = model(torch.tensor([ids])).logits[0].float().numpy()
    got = np.array(ask_llama_cpp(path, prompts=[ids], every=True)["logits"][0])
    return float(places(np.abs(got - want).max(1)) / np.abs(want).max())


def covered() -> list[str]:
    """Every tiny model that has a row in the table."""
    return [name for name in ROWS if type_of(name) in KNOWN]


def type_of(name: str) -> str:
    row = ROWS[name]
    kind = getattr(importlib.import_module("transformers"), row.settings or f"{row.name}Config")
    return str(kind.model_type)


def test_every_row_of_the_table_is_run():
    assert {type_of(name) for name in covered()} == set(KNOWN)


@pytest.mark.parametrize("name", covered())
def test_logits_are_those_of_transformers(tmp_path, name):
    model = build(name, **CHANGES.get(name, {}))
    export_gguf(model, tmp_path / "m.gguf", outtype="f32")
    assert difference(model, tmp_path / "m.gguf") < 1e-3  # GELU is a table there


@pytest.mark.parametrize(
    "name", ["MixtralForCausalLM", "Qwen2MoeForCausalLM", "GPT2LMHeadModel", "Mamba2ForCausalLM"]
)
def test_packed_experts_and_turned_layers(tmp_path, name):
    llm.quantize(build(name), save=tmp_path / "q", method="rtn", bits=8, group_size=32)
    loaded = llm.load(tmp_path / "q")
    report = export_gguf(loaded, tmp_path / "m.gguf", outtype="f32")
    assert report.kept and not report.changed
    # llama.cpp rounds the inputs of packed layers to 8 bits, and a few tokens go to another expert
    assert difference(loaded, tmp_path / "m.gguf", np.median) < 0.05


@pytest.mark.parametrize(("bits", "symmetric"), [(2, True), (3, False), (4, True), (4, False), (8, True)])
def test_packed_layers_run_with_their_codes(tmp_path, bits, symmetric):
    """llama.cpp rounds the inputs of packed layers to 8 bits, hence the tolerance."""
    llm.quantize(
        build("LlamaForCausalLM"),
        save=tmp_path / "q",
        method="rtn",
        bits=bits,
        group_size=32,
        symmetric=symmetric,
    )
    loaded = llm.load(tmp_path / "q")
    report = export_gguf(loaded, tmp_path / "m.gguf", outtype="f32")
    assert report.kept + len(report.changed) == 14 and not any(
        "requantized" in w for w in report.changed.values()
    )
    assert difference(loaded, tmp_path / "m.gguf") < 0.05


@pytest.mark.parametrize("kind", ["sentencepiece", *(name for name, _, _ in CUTS)])
def test_token_ids_are_those_of_transformers(tmp_path, kind):
    if kind == "sentencepiece":
        tokenizer = files.sentencepiece()
    else:
        _, way, ignores = next(row for row in CUTS if row[0] == kind)
        tokenizer = files.byte_level(cut_of(way), **({"ignore_merges": True} if ignores else {}))
    model = build("LlamaForCausalLM", vocab_size=len(tokenizer))
    export_gguf(model, tmp_path / "m.gguf", tokenizer)
    texts = [t for t in files.TEXTS if kind not in SIMPLER or "हि" not in t]  # combining marks: noted
    ids = ask_llama_cpp(tmp_path / "m.gguf", texts=texts)["ids"]
    assert ids == [tokenizer(text)["input_ids"] for text in texts]


def test_unigram_ids_but_for_the_first_space(tmp_path):
    tokenizer = files.unigram()
    model = build("LlamaForCausalLM", vocab_size=len(tokenizer))
    report = export_gguf(model, tmp_path / "m.gguf", tokenizer)
    texts = ["don't they", "the cat and the dog", "12 345 你好", "camelCaseWord", ""]
    ids = ask_llama_cpp(tmp_path / "m.gguf", texts=texts)["ids"]
    assert ids == [tokenizer(text)["input_ids"] for text in texts]
    assert any("adds no second space" in note for note in report.notes)


def test_a_file_that_llama_cpp_cannot_load_is_said(tmp_path):
    (tmp_path / "m.gguf").write_bytes(b"GGUF and nothing else")
    with pytest.raises(ExportError, match=r"m\.gguf: llama.cpp does not run it"):
        ask_llama_cpp(tmp_path / "m.gguf", texts=["a"])
