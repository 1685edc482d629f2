"""LoRA on packed models through PEFT's own interface: training, saving, merging."""

from __future__ import annotations

import builtins
import importlib
import importlib.util
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from sparsebit import llm
from sparsebit.errors import ConfigError, SparsebitError
from sparsebit.llm.layers.linear import QuantLinear
from sparsebit.llm.training import qlora
from sparsebit.numeric.solvers.rtn import rtn
from sparsebit.numeric.spec import QuantSpec


def packed(outputs=32, inputs=64, bits=4, group=32, symmetric=True, **more) -> QuantLinear:
    torch.manual_seed(0)
    q = rtn(torch.randn(outputs, inputs), None, QuantSpec(bits, symmetric, 0, group=group))
    return QuantLinear(q, **more)


# -- what does not need peft -----------------------------------------------------------------------------------
@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("reordered", [False, True])
def test_requantize_takes_the_nearer_grid_of_each_group(symmetric, reordered):
    torch.manual_seed(0)
    g_idx = torch.randperm(64) // 16 if reordered else None
    spec = QuantSpec(4, symmetric, 0, group=16)
    q = rtn(torch.randn(8, 64), None, spec, g_idx=g_idx)
    same = qlora.requantize(q.dequantize(), q)
    assert torch.equal(same.codes, q.codes) and torch.equal(same.scales, q.scales)
    weight = q.dequantize()
    weight[:4] *= 3  # the old grid is too short for these
    new, fresh = qlora.requantize(weight, q), rtn(weight, None, spec, g_idx=g_idx)
    assert (new.dequantize() - weight).norm() <= (fresh.dequantize() - weight).norm() * 1.001
    assert torch.equal(new.scales[4:], q.scales[4:]) and not torch.equal(new.scales[:4], q.scales[:4])
    assert torch.equal(new.dequantize()[4:], weight[4:])
    assert new.bits == 4 and new.symmetric == symmetric and new.group == 16


def test_without_peft_the_extra_is_named(monkeypatch):
    original = builtins.__import__

    def no_peft(name, *args, **kwargs):
        if name.startswith("peft"):
            raise ImportError(name)
        return original(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", no_peft)
    with pytest.raises(SparsebitError, match=r"sparsebit\[qlora\]"):
        qlora.merge(nn.Sequential(packed()))


# -- what does -------------------------------------------------------------------------------------------------
MISSING = [n for n in ("transformers", "peft", "accelerate") if importlib.util.find_spec(n) is None]
needs_peft = pytest.mark.skipif(bool(MISSING), reason=f"not installed: {', '.join(MISSING)}")
SIZES = {
    "vocab_size": 96, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "tie_word_embeddings": False, "pad_token_id": 0,
}  # fmt: skip


def peft():
    sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "zoo"))
    __import__("zoo_shim").install()  # before transformers looks for torchvision
    return importlib.import_module("peft")


def small_llama(**changes) -> nn.Module:
    peft()
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**{**SIZES, **changes})).eval()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    if MISSING:
        pytest.skip(f"not installed: {', '.join(MISSING)}")
    out = tmp_path_factory.mktemp("qlora") / "out"
    llm.quantize(small_llama(), save=out, method="rtn", group_size=32, symmetric=False)
    return out


def tokens(count=4, length=16) -> torch.Tensor:
    return torch.randint(3, 96, (count, length), generator=torch.Generator().manual_seed(1))


def adapted(base, dtype=None, **options):
    """Adapters on a checkpoint or a model."""
    base = base if isinstance(base, nn.Module) else llm.load(base, dtype=dtype)
    config = peft().LoraConfig(**{"r": 4, "target_modules": ["q_proj", "v_proj"], **options})
    torch.manual_seed(3)
    return peft().get_peft_model(base, config)


def train(model, steps=4, lr=0.02, kind=torch.optim.AdamW) -> list[float]:
    optimizer = kind([p for p in model.parameters() if p.requires_grad], lr=lr)
    model.train()
    losses = []
    for _ in range(steps):
        loss = model(input_ids=tokens(), labels=tokens()).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    model.eval()
    return losses


def dequantized(folder) -> nn.Module:
    """The same weights in an ordinary model: what PEFT does there is the reference."""
    model, source = small_llama(), llm.load(folder)
    for name, layer in source.named_modules():
        if isinstance(layer, QuantLinear):
            model.get_submodule(name).weight.data = layer.dequantize(torch.float32)
    return model


@needs_peft
@pytest.mark.parametrize("options", [
    {}, {"target_modules": "all-linear"}, {"use_rslora": True, "lora_dropout": 0.1}, {"use_dora": True},
])  # fmt: skip
def test_it_trains_as_lora_on_the_dequantized_model_does(folder, options):
    model, plain = adapted(folder, **options), adapted(dequantized(folder), **options)
    assert {n for n, p in model.named_parameters() if p.requires_grad} == {
        n for n, p in plain.named_parameters() if p.requires_grad
    }
    found = []
    for m in (model, plain):
        torch.manual_seed(5)  # dropout
        found.append(train(m, 8, 0.3, torch.optim.SGD))  # Adam makes much of the last bits
    assert found[0][-1] < found[0][0] - 0.01
    torch.testing.assert_close(torch.tensor(found[0]), torch.tensor(found[1]), rtol=1e-4, atol=1e-4)


@needs_peft
def test_gradient_checkpointing_and_bfloat16(folder):
    losses = []
    for checkpointing in (False, True):
        model = adapted(folder, dtype=torch.bfloat16, target_modules="all-linear")
        if checkpointing:
            model.gradient_checkpointing_enable()
            model.enable_input_require_grads()
        assert model.base_model.model.model.layers[0].mlp.up_proj.base_layer.dtype == torch.bfloat16
        losses.append(train(model))
    assert losses[0] == losses[1] and losses[0][-1] < losses[0][0] - 0.1


@needs_peft
def test_trainer_of_transformers(folder, tmp_path):
    from transformers import Trainer, TrainingArguments

    model = adapted(folder, task_type="CAUSAL_LM")
    data = [{"input_ids": row, "labels": row} for row in tokens(8)]
    arguments = TrainingArguments(
        str(tmp_path), max_steps=4, learning_rate=0.02, per_device_train_batch_size=4, logging_steps=1,
        report_to=[], use_cpu=True, disable_tqdm=True,
    )  # fmt: skip
    trainer = Trainer(model, arguments, train_dataset=data)
    trainer.train()
    losses = [row["loss"] for row in trainer.state.log_history if "loss" in row]
    assert len(losses) == 4 and losses[-1] < losses[0]


@needs_peft
def test_adapters_are_saved_and_loaded_by_peft(folder, tmp_path):
    model = adapted(folder)
    train(model)
    model.save_pretrained(tmp_path)
    assert sum(p.stat().st_size for p in tmp_path.iterdir()) < 40_000  # the base is not in it
    again = peft().PeftModel.from_pretrained(llm.load(folder), tmp_path)
    torch.testing.assert_close(again(tokens()).logits, model(tokens()).logits, rtol=0, atol=0)
    with model.disable_adapter():
        torch.testing.assert_close(model(tokens()).logits, llm.load(folder)(tokens()).logits, rtol=0, atol=0)


@needs_peft
@pytest.mark.filterwarnings("ignore:.lora_bias:UserWarning")
@pytest.mark.parametrize(
    "options", [{}, {"use_dora": True}, {"lora_bias": True, "target_modules": "all-linear"}]
)
def test_merge_into_float_is_exact(folder, options):
    model = adapted(folder, **options)
    train(model)
    expected = model(tokens()).logits
    merged = qlora.merge(model, into="float")
    torch.testing.assert_close(merged.model(tokens()).logits, expected, rtol=1e-4, atol=1e-4)
    assert type(merged.model).__name__ == "LlamaForCausalLM"
    assert not any(isinstance(m, QuantLinear) for m in merged.model.modules())
    assert not any("lora" in name for name, _ in merged.model.named_parameters())
    assert merged.layers["model.layers.0.self_attn.q_proj"]["error"] < 1e-5 < merged.error + 1
    assert merged.layers["model.layers.0.self_attn.q_proj"]["adapter"] > 0.01
    with torch.no_grad():
        merged.model.generate(tokens()[:1, :4], max_new_tokens=2)


@needs_peft
def test_merge_into_the_grid_tells_its_error_and_can_be_saved(folder, tmp_path):
    model = adapted(folder)
    train(model, steps=20)
    name = "model.layers.1.self_attn.v_proj"
    layer = model.base_model.model.get_submodule(name)
    wanted = layer.base_layer.dequantize(torch.float32) + layer.get_delta_weight("default")
    delta = layer.get_delta_weight("default").detach().norm()
    merged = qlora.merge(model, into="grid")
    new = merged.model.get_submodule(name)
    assert isinstance(new, QuantLinear) and new.bits == 4 and new.group == 32
    error = float((new.dequantize(torch.float32) - wanted.detach()).norm() / delta)
    assert merged.layers[name]["error"] == pytest.approx(error, rel=1e-3) and 0.01 < error < 1
    assert "4 layers merged" in str(merged) and name in str(merged)
    qlora.save(merged.model, folder, tmp_path / "merged")
    again = llm.load(tmp_path / "merged")
    torch.testing.assert_close(again(tokens()).logits, merged.model(tokens()).logits, rtol=0, atol=0)
    assert (again(tokens()).logits - llm.load(folder)(tokens()).logits).abs().max() > 0.01
    with pytest.raises(ConfigError, match="not empty"):
        qlora.save(merged.model, folder, tmp_path / "merged")


@needs_peft
@pytest.mark.parametrize("name", ["MixtralForCausalLM", "GPT2LMHeadModel"])
def test_names_and_shapes_of_the_files_come_back(name, tmp_path):
    """The files call experts otherwise than the model does, and turn Conv1D layers."""
    peft()
    from tiny_transformers import ARCHITECTURES, forced

    built, batch = ARCHITECTURES[name]()
    out = tmp_path / "out"
    llm.quantize(built, save=out, method="rtn", **forced(name))
    target = "c_attn" if name.startswith("GPT2") else "q_proj"
    model = adapted(out, dtype=torch.float32, target_modules=[target], init_lora_weights=False)
    merged = qlora.merge(model, into="grid").model
    qlora.save(merged, out, tmp_path / "merged")
    assert not (tmp_path / "merged" / "README.md").exists()  # it has figures of the model without adapters
    again = llm.load(tmp_path / "merged", dtype=torch.float32)
    with torch.no_grad():
        assert torch.equal(again(**batch).logits, merged(**batch).logits)
        assert not torch.equal(again(**batch).logits, llm.load(out, dtype=torch.float32)(**batch).logits)


@needs_peft
def test_adapters_of_float_layers_are_merged_too(folder):
    model = adapted(folder, target_modules=["q_proj", "lm_head"])
    train(model)
    expected = model(tokens()).logits
    merged = qlora.merge(model).model
    torch.testing.assert_close(merged(tokens()).logits, expected, rtol=1e-4, atol=1e-4)


@needs_peft
def test_a_float_merge_is_an_ordinary_checkpoint(folder, tmp_path):
    from transformers import AutoModelForCausalLM

    model = adapted(folder)  # layers without adapters become float as well
    train(model)
    merged = qlora.merge(model).model
    merged.save_pretrained(tmp_path)
    again = AutoModelForCausalLM.from_pretrained(tmp_path)
    torch.testing.assert_close(again(tokens()).logits, merged(tokens()).logits, rtol=1e-5, atol=1e-5)


@needs_peft
def test_wrong_merges_are_refused(folder):
    model = adapted(folder)
    with pytest.raises(SparsebitError, match=r"qlora\.merge"):  # PEFT would write to a copy, silently
        model.merge_and_unload()
    with pytest.raises(SparsebitError, match=r"qlora\.merge"):
        adapted(folder).merge_adapter(safe_merge=True)
    with pytest.raises(ConfigError, match="'float' or 'grid'"):
        qlora.merge(model, into="int")
    with pytest.raises(ConfigError, match="no packed layer"):
        qlora.merge(llm.load(folder))
