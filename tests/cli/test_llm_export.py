"""`sparsebit llm export --gguf`: a folder becomes a file, and every mistake is one line and exit code 2."""

from __future__ import annotations

import importlib
import importlib.util
import json
import sys
from pathlib import Path

import pytest

for package in ("transformers", "gguf"):
    if importlib.util.find_spec(package) is None:
        pytest.skip(
            f"{package} is not installed (pip install 'sparsebit[llm]' gguf)", allow_module_level=True
        )
sys.path[:0] = [str(Path(__file__).resolve().parents[1] / part) for part in ("llm", "zoo")]
__import__("zoo_shim").install()
files = importlib.import_module("gguf_files")
ARCHITECTURES = importlib.import_module("tiny_transformers").ARCHITECTURES


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    tokenizer = files.byte_level()
    llama = ARCHITECTURES["LlamaForCausalLM"](vocab_size=len(tokenizer))[0]
    return files.save(tokenizer, llama, tmp_path_factory.mktemp("models") / "tiny")


def test_a_folder_becomes_a_file(sparsebit, model, tmp_path):
    path = tmp_path / "tiny.gguf"
    done = sparsebit(f"llm export {model} --gguf {path} --outtype q8_0 --json")
    assert done.code == 0, done.err
    facts = json.loads(done.out)
    assert (
        facts["path"] == str(path)
        and facts["architecture"] == "llama"
        and facts["bytes"] == path.stat().st_size
    )
    assert facts["tokenizer"] == "gpt2 (gpt-2), 401 tokens" and facts["tensors"]["Q8_0"] == 15
    fields = importlib.import_module("gguf").GGUFReader(str(path)).fields
    assert fields["general.name"].contents() == "tiny"
    done = sparsebit(f"llm export {model} --gguf {path} --overwrite --name Other")
    assert done.code == 0 and "tokenizer    gpt2 (gpt-2), 401 tokens" in done.out


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("", "--gguf: which file?"),
        ("--gguf {there}", "already exists; name another file, or pass overwrite=True (--overwrite)"),
        ("--gguf {folder}", "is a folder"),
        ("--gguf {folder}/no/x.gguf", "its folder does not exist"),
        ("--gguf {folder}/x.gguf --outtype q5_k", "outtype: must be one of auto, f32"),
        ("--gguf {folder}/x.gguf --tokenizer {folder}", "holds no tokenizer"),
    ],
)
def test_mistakes_are_one_line(sparsebit, model, tmp_path, words, said):
    (tmp_path / "there.gguf").write_bytes(b"precious")
    names = {"there": tmp_path / "there.gguf", "folder": tmp_path}
    done = sparsebit(f"llm export {model} {words.format(**names)}")
    assert done.code == 2 and said in done.err and len(done.err.splitlines()) == 1
    assert [p.name for p in tmp_path.iterdir()] == ["there.gguf"]


def test_a_model_without_a_tokenizer(sparsebit, model, tmp_path):
    for name in ("config.json", "model.safetensors"):
        (tmp_path / name).write_bytes((model / name).read_bytes())
    done = sparsebit(f"llm export {tmp_path} --gguf {tmp_path / 'x.gguf'}")
    assert done.code == 2 and "tokenizer" in done.err and len(done.err.splitlines()) == 1
    assert not (tmp_path / "x.gguf").exists()


def test_a_file_that_llama_cpp_runs_otherwise_is_exit_code_1(sparsebit, model, tmp_path, monkeypatch):
    certificate = importlib.import_module("sparsebit.llm.gguf.certificate")
    wrong = {"version": "1.2", "logits": [[[0.0]]]}
    monkeypatch.setattr(certificate, "has_llama_cpp", lambda: True)
    monkeypatch.setattr(certificate, "ask_llama_cpp", lambda *args, **kwargs: wrong)
    done = sparsebit(f"llm export {model} --gguf {tmp_path / 'x.gguf'} --json")
    assert done.code == 1 and json.loads(done.out)["ok"] is False
    assert done.err.count("error: ") == 1 and "llama.cpp 1.2: failed" in done.err


def test_a_folder_that_is_none(sparsebit, tmp_path):
    done = sparsebit(f"llm export {tmp_path} --gguf {tmp_path / 'x.gguf'}")
    assert done.code == 2 and "is not a folder with a config.json" in done.err
