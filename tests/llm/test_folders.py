"""Every architecture, from a model and from its folder: the right class, the same bytes, and no tensor lost."""

from __future__ import annotations

import importlib
import importlib.util
import json
import shutil
import sys
from pathlib import Path

import pytest
import torch
from tiny_transformers import ARCHITECTURES, SEQ2SEQ, SIZES, batch_of, forced, translated, words

from sparsebit import llm
from sparsebit.errors import ConfigError, SparsebitError

if importlib.util.find_spec("transformers") is None:
    pytest.skip("transformers is not installed (pip install sparsebit[llm])", allow_module_level=True)

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "zoo"))
__import__("zoo_shim").install()  # before transformers looks for torchvision
transformers = importlib.import_module("transformers")
safetensors = importlib.import_module("safetensors.torch")
PACKED = (".weight_packed", ".weight_scale", ".weight_shape")
STACKED = {"GraniteMoeForCausalLM"}  # its checkpoints have no names for single experts


def saved(name: str, folder: Path, **changes):
    """The model and its folder."""
    model, batch = ARCHITECTURES[name](**changes)
    model.save_pretrained(folder)
    return model, batch


def tensors_in(folder: Path) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = {}
    for path in sorted(folder.glob("*.safetensors")):
        found.update(safetensors.load_file(path))
    return found


def rtn(source, out: Path, **options):
    return llm.quantize(source, save=out, **{"method": "rtn", "bits": 8, "group_size": 32, **options})


def logits(model, batch) -> torch.Tensor:
    with torch.no_grad():
        return model(**batch).logits


def change(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a - b).square().mean() / b.square().mean())


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_a_model_and_its_folder_give_the_same_bytes_and_lose_nothing(name, tmp_path):
    model, batch = saved(name, tmp_path / "float")
    before = tensors_in(tmp_path / "float")
    batches, options = [batch, batch_of(name, 3)], {"bits": 8, "group_size": 32, "refine": 0, **forced(name)}
    report = llm.quantize(model, batches, save=tmp_path / "a", **options)
    llm.quantize(tmp_path / "float", batches, save=tmp_path / "b", **options)
    for path in sorted((tmp_path / "a").glob("*.safetensors")):
        assert path.read_bytes() == (tmp_path / "b" / path.name).read_bytes(), path.name

    after, packed = tensors_in(tmp_path / "b"), set()
    for key, tensor in before.items():
        layer = key.removesuffix(".weight")
        if key in after:
            assert torch.equal(after[key], tensor), key
        elif name not in STACKED or tensor.dim() < 3:
            assert {layer + leaf for leaf in PACKED} <= set(after), key
            packed.add(layer)
    new = {key for key in after if key not in before}
    if name not in STACKED:
        assert new == {layer + leaf for layer in packed for leaf in PACKED}
        assert len(packed) == len(report.layers)

    loaded = llm.load(tmp_path / "b")
    assert type(loaded) is type(model)
    assert json.loads((tmp_path / "b" / "config.json").read_text())["architectures"] == [name]
    assert change(logits(loaded, batch), logits(model, batch)) < 1e-3
    assert not [n for n, p in loaded.named_parameters() if p.is_meta]


@pytest.mark.parametrize("name", ["MixtralForCausalLM", "T5ForConditionalGeneration", "GPT2LMHeadModel"])
def test_only_one_block_is_read_at_a_time(name, tmp_path):
    from sparsebit.llm.models.sources import OnDisk

    saved(name, tmp_path)
    source = OnDisk(tmp_path)
    for i in range(len(source.layout)):
        assert all(p.is_meta for p in source.blocks.parameters())
        assert not any(p.is_meta for p in source.block(i).parameters())


def test_experts_have_the_names_of_the_checkpoint(tmp_path):
    saved("MixtralForCausalLM", tmp_path / "float")
    report = rtn(tmp_path / "float", tmp_path / "out")
    assert "model.layers.1.mlp.experts.3.w2" in report.layers  # as the model calls it
    assert "model.layers.1.block_sparse_moe.experts.3.w2.weight_packed" in tensors_in(tmp_path / "out")
    theirs = transformers.MixtralForCausalLM.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not theirs[1]["missing_keys"] and not theirs[1]["unexpected_keys"]
    batch = batch_of("MixtralForCausalLM")
    torch.testing.assert_close(
        logits(llm.load(tmp_path / "out"), batch), logits(theirs[0].eval(), batch), rtol=0, atol=1e-3
    )


def test_experts_that_a_folder_keeps_stacked_are_read_too(tmp_path):
    """As transformers saves them without going back to the old layout."""
    model, batch = ARCHITECTURES["Qwen3MoeForCausalLM"]()
    model.save_pretrained(tmp_path / "float", save_original_format=False)
    assert "model.layers.0.mlp.experts.gate_up_proj" in tensors_in(tmp_path / "float")
    rtn(tmp_path / "float", tmp_path / "out")
    assert "model.layers.0.mlp.experts.2.up_proj.weight_packed" in tensors_in(tmp_path / "out")
    assert change(logits(llm.load(tmp_path / "out"), batch), logits(model, batch)) < 1e-3


def test_a_folder_of_the_model_without_its_head_has_other_prefixes(tmp_path):
    """As the first GPT-2 was published: h.0.attn, not transformer.h.0.attn."""
    model, batch = saved("GPT2LMHeadModel", tmp_path / "float")
    state = tensors_in(tmp_path / "float")
    short = {key.removeprefix("transformer."): tensor for key, tensor in state.items()}
    safetensors.save_file(short, tmp_path / "float" / "model.safetensors", {"format": "pt"})
    rtn(tmp_path / "float", tmp_path / "out", **forced("GPT2LMHeadModel"))
    assert "h.0.attn.c_attn.weight_packed" in tensors_in(tmp_path / "out")
    assert change(logits(llm.load(tmp_path / "out"), batch), logits(model, batch)) < 1e-3


def test_tensors_that_checkpoints_leave_out_are_computed(tmp_path):
    """Marian's tables of sines are in no file."""
    torch.manual_seed(0)
    model = transformers.MarianMTModel(transformers.MarianConfig(**SEQ2SEQ)).eval()
    model.save_pretrained(tmp_path / "float")
    assert not [key for key in tensors_in(tmp_path / "float") if "embed_positions" in key]
    rtn(model, tmp_path / "a")
    rtn(tmp_path / "float", tmp_path / "b")
    first, second = tensors_in(tmp_path / "a"), tensors_in(tmp_path / "b")
    assert set(first) == set(second) and all(torch.equal(first[key], second[key]) for key in first)
    batch = translated()
    assert change(logits(llm.load(tmp_path / "b"), batch), logits(model, batch)) < 1e-3


def test_a_class_that_the_files_spell_in_another_way(tmp_path):
    """Phi-3.5-MoE's config.json says PhiMoEForCausalLM, transformers PhimoeForCausalLM."""
    settings = {**SIZES, "num_local_experts": 4, "num_experts_per_tok": 2}
    torch.manual_seed(0)
    model = transformers.PhimoeForCausalLM(transformers.PhimoeConfig(**settings)).eval()
    model.save_pretrained(tmp_path / "float")
    config = json.loads((tmp_path / "float" / "config.json").read_text())
    config["architectures"] = ["PhiMoEForCausalLM"]
    (tmp_path / "float" / "config.json").write_text(json.dumps(config))
    report = rtn(tmp_path / "float", tmp_path / "out")
    assert [row.state for row in report.readers] == ["runs", "fits"]
    assert json.loads((tmp_path / "out" / "config.json").read_text())["architectures"] == [
        "PhiMoEForCausalLM"
    ]
    batch = {"input_ids": words()}
    assert change(logits(llm.load(tmp_path / "out"), batch), logits(model, batch)) < 1e-3


def rewrite(folder: Path, edit) -> None:
    state = tensors_in(folder)
    edit(state)
    safetensors.save_file(state, folder / "model.safetensors", {"format": "pt"})


def test_tensors_that_the_model_does_not_use_are_copied(tmp_path):
    """Such as the layers with which DeepSeek-V3 guesses tokens ahead."""
    model, batch = saved("LlamaForCausalLM", tmp_path / "float")
    rewrite(
        tmp_path / "float", lambda state: state.update({"model.layers.2.eh_proj.weight": torch.ones(3, 5)})
    )
    rtn(tmp_path / "float", tmp_path / "out")
    assert torch.equal(tensors_in(tmp_path / "out")["model.layers.2.eh_proj.weight"], torch.ones(3, 5))
    assert change(logits(llm.load(tmp_path / "out"), batch), logits(model, batch)) < 1e-3


def test_a_tensor_that_is_missing_is_named_before_the_work_begins(tmp_path):
    saved("BartForConditionalGeneration", tmp_path / "float")
    rewrite(tmp_path / "float", lambda state: state.pop("model.encoder.layers.1.fc1.weight"))
    with pytest.raises(ConfigError, match=r"1 tensors of BartFor.* 'model.encoder.layers.1.fc1.weight'"):
        rtn(tmp_path / "float", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_tensor_of_another_shape_is_named(tmp_path):
    saved("LlamaForCausalLM", tmp_path / "float")
    rewrite(tmp_path / "float", lambda state: state.update({"model.norm.weight": torch.ones(65)}))
    with pytest.raises(ConfigError, match=r"model.norm.weight is \(65,\) in the files, but \(64,\)"):
        rtn(tmp_path / "float", tmp_path / "out")


def test_weights_that_should_be_tied_but_differ_stay_two(tmp_path):
    model, batch = saved("LlamaForCausalLM", tmp_path / "float")
    head = torch.randn(96, 64)
    rewrite(tmp_path / "float", lambda state: state.update({"lm_head.weight": head}))
    rtn(tmp_path / "float", tmp_path / "out")
    loaded = llm.load(tmp_path / "out")
    assert torch.equal(loaded.lm_head.weight, head)
    assert torch.equal(loaded.model.embed_tokens.weight, model.model.embed_tokens.weight)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "float").eval()
    assert change(logits(loaded, batch), logits(theirs, batch)) < 1e-3


def test_a_quantized_folder_is_refused(tmp_path):
    saved("LlamaForCausalLM", tmp_path / "float")
    rtn(tmp_path / "float", tmp_path / "out")
    with pytest.raises(ConfigError, match="is quantized already"):
        rtn(tmp_path / "out", tmp_path / "again")


def test_a_class_that_transformers_does_not_have_is_named(tmp_path):
    saved("LlamaForCausalLM", tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "architectures": ["MyOwnForCausalLM"]}))
    with pytest.raises(ConfigError, match="names the class 'MyOwnForCausalLM'"):
        rtn(tmp_path, tmp_path / "out")


def test_a_run_that_loses_a_tensor_is_not_declared_finished(tmp_path, monkeypatch):
    from sparsebit.llm.checkpoints.store import Store

    model, _ = ARCHITECTURES["LlamaForCausalLM"]()
    write = Store.write

    def forgetful(self, block, tensors, layers):
        write(
            self, block, {k: v for k, v in tensors.items() if "1.post_attention_layernorm" not in k}, layers
        )

    monkeypatch.setattr(Store, "write", forgetful)
    with pytest.raises(
        SparsebitError, match=r"1 tensors of the model .* 'model.layers.1.post_attention_layernorm"
    ):
        rtn(model, tmp_path)
    assert not (tmp_path / "config.json").exists()


def test_bfloat16_with_parts_in_float32(tmp_path):
    """Buffers and modules that transformers keeps in float32 stay so, as in a model that it loads."""
    model, _ = ARCHITECTURES["DeepseekV3ForCausalLM"]()
    model.to(torch.bfloat16).save_pretrained(tmp_path / "float")
    rtn(tmp_path / "float", tmp_path / "out")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "float").state_dict()
    ours = llm.load(tmp_path / "out").state_dict()
    assert {n: t.dtype for n, t in ours.items() if n in theirs} == {
        n: t.dtype for n, t in theirs.items() if n in ours
    }
    shutil.rmtree(tmp_path / "out")
