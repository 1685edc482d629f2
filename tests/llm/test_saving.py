"""`llm.load(folder).save_pretrained(other)`, which the Trainer and every user calls, writes the format again."""

from __future__ import annotations

import copy
import importlib
import importlib.util
import json
import pickle
import shutil
import sys
from pathlib import Path

import pytest
import torch
from tiny_transformers import ARCHITECTURES

from sparsebit import llm
from sparsebit.errors import ConfigError

if importlib.util.find_spec("transformers") is None:
    pytest.skip("transformers is not installed (pip install sparsebit[llm])", allow_module_level=True)

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "zoo"))
__import__("zoo_shim").install()  # before transformers looks for torchvision
transformers = importlib.import_module("transformers")
safetensors = importlib.import_module("safetensors.torch")

LLAMA = "LlamaForCausalLM"
# tied weights, Conv1D, named and stacked experts, renamed tensors, two towers, a tower that stays float
KINDS = [LLAMA, "GPT2LMHeadModel", "MixtralForCausalLM", "GraniteMoeForCausalLM", "DeepseekV3ForCausalLM"]
KINDS += ["GPTNeoXForCausalLM", "T5ForConditionalGeneration", "LlavaForConditionalGeneration"]


def tensors_in(folder: Path) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = {}
    for path in sorted(folder.glob("*.safetensors")):
        found.update(safetensors.load_file(path))
    return found


def config_of(folder: Path) -> dict:
    return json.loads((folder / "config.json").read_text())


def quantized(name: str, folder: Path, **options) -> Path:
    model, _ = ARCHITECTURES[name]()
    llm.quantize(model, save=folder, method="rtn", force=True, **options)
    return folder


def assert_same(a: Path, b: Path) -> None:
    first, second = tensors_in(a), tensors_in(b)
    assert set(first) == set(second)
    assert not [key for key in first if not torch.equal(first[key], second[key])]
    for key in ("quantization_config", "architectures", "model_type", "sparsebit"):
        assert config_of(a)[key] == config_of(b)[key]


FORMS = [(name, {}) for name in KINDS]
FORMS += [(name, {"format": "gptq", "bits": 3}) for name in KINDS[:4]]
FORMS += [(name, {"symmetric": False}) for name in KINDS[:3]]


@pytest.mark.parametrize("name, options", FORMS)
def test_every_tensor_comes_back_under_its_name(name, options, tmp_path):
    quantized(name, tmp_path / "a", **options)
    llm.load(tmp_path / "a").save_pretrained(tmp_path / "b")
    assert_same(tmp_path / "a", tmp_path / "b")
    assert (tmp_path / "b" / "README.md").is_file()


@pytest.mark.parametrize("method", ["smoothquant", "wanda"])
def test_the_other_formats(method, tmp_path):
    model, batch = ARCHITECTURES[LLAMA]()
    llm.quantize(model, [batch], save=tmp_path / "a", method=method)
    loaded = llm.load(tmp_path / "a")
    loaded.save_pretrained(tmp_path / "b")
    first, second = tensors_in(tmp_path / "a"), tensors_in(tmp_path / "b")
    assert all(torch.equal(first[key], second[key]) for key in [*first, *second])
    with torch.no_grad():
        assert torch.equal(llm.load(tmp_path / "b")(**batch).logits, loaded(**batch).logits)


def test_transformers_reads_what_was_saved_again(tmp_path):
    pytest.importorskip("compressed_tensors", reason="compressed-tensors is not installed")
    batch = ARCHITECTURES[LLAMA]()[1]
    loaded = llm.load(quantized(LLAMA, tmp_path / "a"))
    loaded.save_pretrained(tmp_path / "b", max_shard_size="20KB")
    assert len(list((tmp_path / "b").glob("model-*.safetensors"))) > 2
    theirs, info = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "b", output_loading_info=True, dtype=torch.float32
    )
    assert not info["missing_keys"] and not info["unexpected_keys"]
    with torch.no_grad():
        torch.testing.assert_close(theirs(**batch).logits, loaded(**batch).logits, rtol=1e-4, atol=1e-4)


def test_changes_are_saved_and_copies_save_themselves(tmp_path):
    loaded = llm.load(quantized(LLAMA, tmp_path / "a"))
    for number, other in enumerate([copy.deepcopy(loaded), pickle.loads(pickle.dumps(loaded))]):
        with torch.no_grad():
            other.model.norm.weight.fill_(3.0 + number)
        other.save_pretrained(tmp_path / str(number))
        saved = tensors_in(tmp_path / str(number))
        assert torch.equal(saved["model.norm.weight"], torch.full((64,), 3.0 + number))
    loaded.save_pretrained(tmp_path / "same")
    assert_same(tmp_path / "a", tmp_path / "same")


def test_the_folder_may_be_overwritten_or_gone(tmp_path):
    quantized(LLAMA, tmp_path / "a")
    before = tensors_in(tmp_path / "a")
    loaded = llm.load(tmp_path / "a")
    loaded.save_pretrained(tmp_path / "a")
    after = tensors_in(tmp_path / "a")
    assert set(after) == set(before) and all(torch.equal(after[key], before[key]) for key in before)
    assert [path.name for path in (tmp_path / "a").glob("*.safetensors")] == ["model.safetensors"]
    shutil.rmtree(tmp_path / "a")
    loaded.save_pretrained(tmp_path / "b")
    assert set(tensors_in(tmp_path / "b")) == set(before)


def test_what_cannot_be_done_is_said(tmp_path):
    loaded = llm.load(quantized(LLAMA, tmp_path / "a"))
    with pytest.raises(ConfigError, match="push_to_hub is not there for packed models"):
        loaded.save_pretrained(tmp_path / "b", push_to_hub=True)
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="is a file; name a folder"):
        loaded.save_pretrained(tmp_path / "file")


def test_the_trainer_saves_it(tmp_path):
    """With the optimizer on what stays float, as a user would train norms."""
    pytest.importorskip("accelerate", reason="the Trainer needs accelerate")
    loaded = llm.load(quantized(LLAMA, tmp_path / "a"))
    for name, parameter in loaded.named_parameters():
        parameter.requires_grad_("norm" in name)
    data = [{"input_ids": row, "labels": row} for row in ARCHITECTURES[LLAMA]()[1]["input_ids"]]
    arguments = transformers.TrainingArguments(
        output_dir=str(tmp_path / "runs"), max_steps=2, save_steps=2, report_to=[], use_cpu=True,
        per_device_train_batch_size=2, learning_rate=0.1, disable_tqdm=True,
    )  # fmt: skip
    trainer = transformers.Trainer(model=loaded, args=arguments, train_dataset=data)
    trainer.train()
    trainer.save_model(str(tmp_path / "end"))
    for folder in (tmp_path / "runs" / "checkpoint-2", tmp_path / "end"):
        again = llm.load(folder)
        assert torch.equal(again.model.norm.weight, loaded.model.norm.weight)
        assert (again.model.norm.weight - 1).abs().max() > 0.01
        ids = data[0]["input_ids"][None]
        with torch.no_grad():
            assert torch.equal(again(ids).logits, loaded(ids).logits)
