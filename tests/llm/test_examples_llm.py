"""The scripts with the original's names run, and give what they say."""

from __future__ import annotations

import argparse
import importlib.util
import inspect
import json
import os
import runpy
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from test_walk import tiny, tokens

from sparsebit import llm
from sparsebit.errors import ConfigError
from sparsebit.llm.legacy import from_legacy, load_legacy, to_legacy, write_legacy

ROOT = Path(__file__).resolve().parents[2]


def script(name: str):
    return runpy.run_path(str(ROOT / "examples" / "llm" / name))["main"]


def test_pack32_to_pack8_and_back(tmp_path, capsys):
    model = tiny()
    llm.quantize(model, save=tmp_path / "out", method="rtn", group_size=16, symmetric=False)
    loaded = llm.load(tmp_path / "out", model)
    torch.save(to_legacy(loaded), tmp_path / "a.pt")
    main = script("convert_pack32topack8.py")
    main([str(tmp_path / "a.pt"), str(tmp_path / "b.pt")])
    assert "21 layers" in capsys.readouterr().out
    main([str(tmp_path / "b.pt"), str(tmp_path / "c.pt"), "--to32"])
    a, b, c = (torch.load(tmp_path / f"{n}.pt") for n in "abc")
    assert b["model"]["layers.0.gate.qweight"].dtype == torch.int8
    assert all(torch.equal(v, c["model"][k]) for k, v in a["model"].items())
    torch.testing.assert_close(from_legacy(b, model)(tokens()[0]), loaded(tokens()[0]), rtol=1e-5, atol=1e-5)
    with pytest.raises(SystemExit, match=r"not packed as torch\.int32"):
        main([str(tmp_path / "b.pt"), str(tmp_path / "d.pt")])


def missing(*names: str) -> str:
    lost = [name for name in names if importlib.util.find_spec(name) is None]
    return f"not installed: {', '.join(lost)}" if lost else ""


def model_folder(tmp_path: Path) -> tuple[Path, Path]:
    """A small LLaMA with a tokenizer of words, and a text in its language."""
    sys.path.insert(0, str(ROOT / "tests" / "zoo"))
    __import__("zoo_shim").install()
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    words = [f"w{i}" for i in range(60)]
    frame = ["###", "Instruction", "Input", "Response", ":"]
    vocabulary = {w: i for i, w in enumerate(["<unk>", "<s>", "</s>", "<pad>", *words, *frame])}
    plain = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    plain.pre_tokenizer = pre_tokenizers.Whitespace()
    model_dir = tmp_path / "model"
    PreTrainedTokenizerFast(tokenizer_object=plain, unk_token="<unk>").save_pretrained(model_dir)
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4}
    LlamaForCausalLM(LlamaConfig(vocab_size=len(vocabulary), **sizes)).save_pretrained(model_dir)
    text = tmp_path / "text.txt"
    drawn = torch.randint(0, 60, (400,), generator=torch.Generator().manual_seed(0)).tolist()
    rows = [" ".join(words[i] for i in drawn[at : at + 20]) for at in range(0, 400, 20)]
    text.write_text("\n\n".join(rows))
    return model_dir, text


TRANSFORMERS = pytest.mark.skipif(bool(missing("transformers")), reason=missing("transformers"))
SHORT = ["--nsamples", "4", "--seqlen", "32", "--groupsize", "32"]


@TRANSFORMERS
@pytest.mark.parametrize("save", ["out", "old.pt"])
def test_convert_and_inference(tmp_path, save, capsys):
    model_dir, text = model_folder(tmp_path)
    figure = script("convert.py")([
        str(model_dir), "--text", str(text), "--eval-text", str(text), "--nsamples", "4", "--seqlen", "32",
        "--candidate-bits", "2", "3", "4", "--average-bits", "3", "--groupsize", "32", "--save", str(tmp_path / save),
    ])  # fmt: skip
    shown = capsys.readouterr().out
    assert "14 layers at" in shown and f"perplexity {figure:.3f}" in shown and 10 < figure < 300
    out = script("inference.py")(
        [str(model_dir), str(tmp_path / save), "--prompt", "w1 w2 w3", "--max-new-tokens", "4"]
    )
    assert len(out.split()) == 7


@TRANSFORMERS
@pytest.mark.parametrize("save", ["out", "x.pth.tar"])
def test_the_texts_of_the_environment_and_one_perplexity(tmp_path, save, capsys, monkeypatch):
    model_dir, text = model_folder(tmp_path)
    monkeypatch.setenv("SPARSEBIT_TEXT", str(text))
    monkeypatch.setenv("SPARSEBIT_EVAL_TEXT", str(text))
    target = tmp_path / "new" / save
    script("convert.py")([str(model_dir), "--candidate-bits", "2", "3", "4", *SHORT, "--save", str(target)])
    converted = capsys.readouterr().out.splitlines()[-1]
    assert converted.startswith("perplexity ")
    assert [path.name for path in target.parent.iterdir()] == [save]  # nothing is left beside it
    options = ["--seqlen", "32", "--groupsize", "32", "--single_device_mode", "--max-new-tokens", "2"]
    script("inference.py")([str(model_dir), str(target), "--prompt", "w1 w2", *options])
    assert capsys.readouterr().out.splitlines()[-1] == converted


@TRANSFORMERS
def test_a_saved_file_has_the_layout_of_the_original(tmp_path):
    model_dir, text = model_folder(tmp_path)
    target = tmp_path / "x.pth.tar"
    target.write_text("an old file is replaced")
    script("convert.py")([
        str(model_dir), "--text", str(text), "--candidate-bits", "3", *SHORT, "--save", str(target)
    ])  # fmt: skip
    found = torch.load(target, weights_only=True)
    assert list(found) == ["model", "hyper_parameters", "layers_bit"]
    assert found["hyper_parameters"] == {"groupsize": 32}
    assert set(found["layers_bit"].values()) == {3} and len(found["layers_bit"]) == 14
    layer = "model.layers.1.mlp.down_proj"  # 96 inputs, 64 outputs
    shapes = {
        key: tuple(found["model"][f"{layer}.{key}"].shape) for key in ("qweight", "scales", "zeros", "bias")
    }
    assert shapes == {"qweight": (9, 64), "scales": (64, 3, 1), "zeros": (64, 3, 1), "bias": (64,)}
    assert found["model"][f"{layer}.qweight"].dtype == torch.int32
    assert "model.embed_tokens.weight" in found["model"] and f"{layer}.weight" not in found["model"]


def test_the_command_line_of_convert():
    parser = runpy.run_path(str(ROOT / "examples" / "llm" / "convert.py"))["options"]()
    args = parser.parse_args(["name", "--candidate-bits", "2", "3", "4"])
    given = {
        "seed": 0,
        "nsamples": 128,
        "percdamp": 0.01,
        "groupsize": -1,
        "candidate_bits": [2, 3, 4],
        "save": None,
    }
    assert {key: getattr(args, key) for key in given} == given and args.model_name == "name"


SCRIPTS = ["convert", "convert_pack32topack8", "finetune", "finetune_pp", "generate", "inference"]


@pytest.mark.parametrize("name", SCRIPTS)
def test_help_says_something_about_every_option(name, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    with pytest.raises(SystemExit) as stop:
        script(f"{name}.py")(["--help"])
    shown = capsys.readouterr().out
    assert stop.value.code == 0 and f"python {name}.py " in shown
    options = shown[shown.index("options:") :].splitlines()[1:]
    bare = [line for line in options if line.startswith("  -") and len(line.split("  ")) < 3]
    follow = [options[options.index(line) + 1] for line in bare]
    assert all(line.startswith("     ") for line in follow)


def refused(capsys, name: str, *arguments: object) -> str:
    """The one line that a script says before it ends with code 2."""
    capsys.readouterr()
    with pytest.raises(SystemExit) as stop:
        script(f"{name}.py")([str(argument) for argument in arguments])
    shown = capsys.readouterr().err.strip().splitlines()
    assert stop.value.code == 2 and len(shown) == 1, shown
    return shown[0]


@TRANSFORMERS
def test_wrong_arguments_of_convert(tmp_path, capsys, monkeypatch):
    monkeypatch.delenv("SPARSEBIT_TEXT", raising=False)
    monkeypatch.setattr(llm, "quantize", None)  # nothing gets that far
    model, text = model_folder(tmp_path)
    (tmp_path / "empty.txt").write_text("\n")
    (tmp_path / "folder").mkdir()
    bits, given = ["--candidate-bits", "4"], ["--text", text]
    line = refused(capsys, "convert", tmp_path / "no_model", *bits)  # first of all the text
    assert "--text FILE" in line and "SPARSEBIT_TEXT" in line
    assert "cannot be read" in refused(capsys, "convert", model, *bits, "--text", tmp_path / "no.txt")
    assert "empty" in refused(capsys, "convert", model, *bits, "--text", tmp_path / "empty.txt")
    assert "no such folder" in refused(capsys, "convert", tmp_path / "no_model", *bits, *given)
    assert "no config.json" in refused(capsys, "convert", tmp_path / "folder", *bits, *given)
    assert "candidate-bits" in refused(capsys, "convert", model, *given)
    assert "invalid choice: 5" in refused(capsys, "convert", model, *given, "--candidate-bits", "5")
    assert "8 bits in a folder" in refused(
        capsys, "convert", model, *given, "--candidate-bits", "8", "--save", tmp_path / "x.pth.tar"
    )
    assert "between 4 and 4" in refused(capsys, "convert", model, *bits, *given, "--average-bits", "3")
    assert "--groupsize 0" in refused(capsys, "convert", model, *bits, *given, "--groupsize", "0")
    assert "above 0" in refused(capsys, "convert", model, *bits, *given, "--nsamples", "0")
    assert "cannot be written" in refused(capsys, "convert", model, *bits, *given, "--save", text / "x.pt")
    monkeypatch.setenv("SPARSEBIT_TEXT", str(tmp_path / "no.txt"))
    assert "cannot be read" in refused(capsys, "convert", model, *bits)


@TRANSFORMERS
def test_wrong_arguments_of_the_readers(tmp_path, capsys):
    model, text = model_folder(tmp_path)
    llm.quantize(model, save=tmp_path / "out", method="rtn", group_size=32, symmetric=False)
    torch.save(to_legacy(llm.load(tmp_path / "out")), tmp_path / "x.pt")
    torch.save({"state_dict": {}}, tmp_path / "other.pt")
    out, file, none = tmp_path / "out", tmp_path / "x.pt", tmp_path / "none"
    assert "no such checkpoint" in refused(capsys, "inference", model, none)
    assert "no such folder" in refused(capsys, "inference", none, out)
    assert "not a file of torch.save" in refused(capsys, "inference", model, text)
    assert "has no 'model'" in refused(capsys, "inference", model, tmp_path / "other.pt")
    assert "the checkpoint has 32" in refused(capsys, "inference", model, file, "--groupsize", "-1")
    assert "--model_name" in refused(capsys, "generate", file, "--prompt", "w1")
    assert "no such checkpoint" in refused(capsys, "generate", none, "--prompt", "w1")
    assert "not quantized" in refused(capsys, "generate", model, "--prompt", "w1")
    assert "--prompt" in refused(capsys, "generate", out)
    assert "no tokens" in refused(capsys, "generate", out, "--prompt", " ")
    assert "cannot be read" in refused(capsys, "convert_pack32topack8", none, tmp_path / "y.pt")
    assert "no such folder" in refused(capsys, "convert_pack32topack8", file, none / "y.pt")


PEFT = missing("transformers", "peft", "accelerate")


@pytest.mark.skipif(bool(PEFT), reason=PEFT)
def test_finetune_and_merge(tmp_path):
    model_dir, _ = model_folder(tmp_path)
    llm.quantize(model_dir, save=tmp_path / "out", method="rtn", group_size=32)
    rows = [
        {"instruction": f"w{i} w{i + 1}", "input": "w5" * (i % 2), "output": "w9 w9 w9 w9"} for i in range(8)
    ]
    (tmp_path / "data.json").write_text(json.dumps(rows))
    losses = script("finetune.py")([
        str(tmp_path / "out"), "--data", str(tmp_path / "data.json"), "--save", str(tmp_path / "adapter"),
        "--batch_size", "8", "--micro_batch_size", "4", "--steps", "6", "--learning_rate", "0.01",
        "--merge", str(tmp_path / "merged"), "--checkpointing",
    ])  # fmt: skip
    assert len(losses) == 6 and losses[-1] < losses[0]
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    tuned = PeftModel.from_pretrained(llm.load(tmp_path / "out"), tmp_path / "adapter")
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    ids = torch.arange(4, 20)[None]
    torch.testing.assert_close(merged(ids).logits, tuned(ids).logits, rtol=1e-4, atol=1e-4)
    with pytest.raises(AssertionError):
        torch.testing.assert_close(
            merged(ids).logits, llm.load(tmp_path / "out")(ids).logits, rtol=1e-2, atol=1e-2
        )


@pytest.mark.skipif(bool(PEFT), reason=PEFT)
def test_finetune_a_file_and_generate(tmp_path, capsys):
    """Eight instructions with one answer are learnt, and asked for in the words of the training."""
    model_dir, _ = model_folder(tmp_path)
    from transformers import LlamaForCausalLM

    model = LlamaForCausalLM.from_pretrained(model_dir)
    model.lm_head.weight.data *= 20  # logits large enough to be sure of a word
    model.save_pretrained(model_dir)
    llm.quantize(model_dir, save=tmp_path / "out", method="rtn", group_size=32, symmetric=False)
    write_legacy(to_legacy(llm.load(tmp_path / "out")), tmp_path / "x.pth.tar")
    rows = [{"instruction": f"w{i}", "input": "w5" * (i % 2), "output": "w9 w8 w7 w9"} for i in range(8)]
    (tmp_path / "data.json").write_text(json.dumps(rows))
    source = [str(tmp_path / "x.pth.tar"), "--model_name", str(model_dir)]
    adapter = str(tmp_path / "adapter")
    script("finetune.py")([
        *source, "--data", str(tmp_path / "data.json"), "--save", adapter, "--batch_size", "8", "--steps", "60",
        "--learning_rate", "0.01", "--lora_dropout", "0", "--lora_target_modules", "v_proj", "o_proj", "down_proj",
    ])  # fmt: skip
    generate = script("generate.py")
    asked = ["--instruction", "w1", "--input", "w5", "--max_new_tokens", "4"]
    assert generate([*source, "--lora_weights", adapter, *asked]).split() == ["w9", "w8", "w7", "w9"]
    assert capsys.readouterr().out.splitlines()[-1] == "w9 w8 w7 w9"
    with_folder = generate([str(tmp_path / "out"), "--lora_weights", adapter, *asked])
    assert with_folder == "w9 w8 w7 w9"
    plain = generate([*source, *asked])
    assert plain != with_folder
    drawn = [generate([*source, *asked, "--temperature", "2", "--seed", seed]) for seed in ("1", "1", "2")]
    assert drawn[0] == drawn[1] != drawn[2]
    assert generate([*source, "--prompt", "w1 w2", "--max_new_tokens", "3", "--num_beams", "2"])
    assert "no adapter_config.json" in refused(
        capsys, "generate", *source, *asked, "--lora_weights", tmp_path
    )
    changed = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text()) | {"r": 4}
    (tmp_path / "adapter" / "adapter_config.json").write_text(json.dumps(changed))
    assert "do not fit" in refused(capsys, "generate", *source, *asked, "--lora_weights", adapter)


@pytest.mark.skipif(bool(PEFT), reason=PEFT)
def test_finetune_pp_takes_a_model_and_a_cache(tmp_path, capsys, monkeypatch):
    """A float model, by the name under which the cache knows it; it is packed there once."""
    model_dir, text = model_folder(tmp_path)
    cache = tmp_path / "cache"
    snapshot = cache / "models--me--tiny" / "snapshots" / ("0" * 40)
    shutil.copytree(model_dir, snapshot)
    (cache / "models--me--tiny" / "refs").mkdir()
    (cache / "models--me--tiny" / "refs" / "main").write_text("0" * 40)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    options = [
        "--data",
        str(text),
        "--batch_size",
        "4",
        "--chunks",
        "2",
        "--steps",
        "2",
        "--save",
        str(tmp_path / "a"),
    ]
    started = []
    monkeypatch.setattr("torch.distributed.run.main", started.append)
    main = script("finetune_pp.py")
    assert main(["me/tiny", str(cache), *options, "--stages", "2"]) is None
    assert started[0][:3] == ["--standalone", "--nproc-per-node", "2"]
    assert started[0][4:] == ["me/tiny", str(cache), *options, "--stages", "2"]

    surroundings = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    for variable, value in surroundings.items():
        monkeypatch.setenv(variable, value)
    losses = main(["me/tiny", str(cache), *options])
    assert len(losses) == 2 and (tmp_path / "a" / "adapter_model.safetensors").is_file()
    assert "is a float model" in capsys.readouterr().out
    assert llm.load(cache / "tiny-w4").model.layers[0].mlp.up_proj.bits == 4
    assert main([str(cache / "tiny-w4"), *options]) == losses  # the packed folder itself, without a cache
    assert "float model" not in capsys.readouterr().out


@pytest.mark.skipif(bool(PEFT), reason=PEFT)
def test_wrong_arguments_of_the_trainers(tmp_path, capsys):
    model, text = model_folder(tmp_path)
    llm.quantize(model, save=tmp_path / "out", method="rtn", group_size=32, symmetric=False)
    write_legacy(to_legacy(llm.load(tmp_path / "out")), tmp_path / "x.pth.tar")
    (tmp_path / "wrong.json").write_text('[{"question": "w1"}]')
    out, file, data = tmp_path / "out", tmp_path / "x.pth.tar", ["--data", text]
    cache = tmp_path / "cache"
    for name in ("finetune", "finetune_pp"):
        assert "cannot be read" in refused(capsys, name, out, "--data", tmp_path / "none.json")
        assert "JSON list" in refused(capsys, name, out, "--data", tmp_path / "wrong.json")
        assert "--model_name" in refused(capsys, name, file, *data)
        assert "no such" in refused(capsys, name, tmp_path / "none", *data)
    assert "not quantized" in refused(capsys, "finetune", model, *data)
    assert "cachedir" in refused(capsys, "finetune_pp", model, *data)
    assert "2 blocks" in refused(capsys, "finetune_pp", out, cache, *data, "--stages", "3")
    assert "multiple" in refused(capsys, "finetune_pp", out, cache, *data, "--chunks", "3")
    assert "nothing" in refused(capsys, "finetune", out, *data, "--lora_target_modules", "nothing")


@TRANSFORMERS
def test_files_that_the_original_wrote(tmp_path):
    """Half precision, options as a Namespace, and the table of positions that transformers 4.28 stored."""
    model_dir, _ = model_folder(tmp_path)
    llm.quantize(model_dir, save=tmp_path / "out", method="rtn", group_size=32, symmetric=False)
    loaded = llm.load(tmp_path / "out")
    found = to_legacy(loaded)
    found["hyper_parameters"] = argparse.Namespace(groupsize=32, nsamples=128)
    for key, tensor in found["model"].items():
        found["model"][key] = tensor.half() if tensor.is_floating_point() else tensor
    found["model"]["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(8)
    write_legacy(found, tmp_path / "x.pth.tar")
    ids = torch.arange(4, 20)[None]
    old = load_legacy(tmp_path / "x.pth.tar", model_dir)
    torch.testing.assert_close(old(ids).logits, loaded(ids).logits, rtol=1e-2, atol=1e-2)
    assert load_legacy(tmp_path / "x.pth.tar", model_dir, torch.bfloat16)(ids).logits.dtype == torch.bfloat16


@TRANSFORMERS
def test_layers_that_are_not_linear_in_the_float_model(tmp_path):
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    sizes = {"n_embd": 32, "n_layer": 2, "n_head": 2, "n_positions": 32, "bos_token_id": 0, "eos_token_id": 0}
    model = GPT2LMHeadModel(GPT2Config(vocab_size=50, **sizes)).eval()
    model.save_pretrained(tmp_path / "model")
    llm.quantize(model, save=tmp_path / "out", method="rtn", group_size=16, symmetric=False)
    loaded = llm.load(tmp_path / "out")
    write_legacy(to_legacy(loaded), tmp_path / "x.pth.tar")
    ids = torch.arange(4, 20)[None]
    for old in (
        load_legacy(tmp_path / "x.pth.tar", tmp_path / "model"),
        from_legacy(to_legacy(loaded), model),
    ):
        torch.testing.assert_close(old(ids).logits, loaded(ids).logits)
        assert old.lm_head.weight is old.transformer.wte.weight
    untied = to_legacy(loaded)
    untied["model"]["lm_head.weight"] = untied["model"]["lm_head.weight"] + 1
    with pytest.raises(ConfigError, match="differ, and are one tensor in this model"):
        from_legacy(untied, model)


def test_files_that_do_not_fit_the_model(tmp_path):
    model = tiny()
    llm.quantize(model, save=tmp_path / "out", method="rtn", group_size=16, symmetric=False)
    good = to_legacy(llm.load(tmp_path / "out", model))
    name = next(iter(good["layers_bit"]))

    def refuses(match: str, **changes: object) -> None:
        with pytest.raises(ConfigError, match=match):
            from_legacy({**good, **changes}, model)

    tensors = good["model"]
    words = tensors[f"{name}.qweight"]
    refuses("has no layer 'layers.9.x'", layers_bit={**good["layers_bit"], "layers.9.x": 4})
    refuses(f"has no '{name}.scales'", model={k: v for k, v in tensors.items() if k != f"{name}.scales"})
    refuses("rows", model={**tensors, f"{name}.qweight": torch.cat([words, words])})
    refuses("outputs, in the model", model={**tensors, f"{name}.qweight": words[:, 1:]})
    refuses("groups of 8", hyper_parameters={"groupsize": 8})
    refuses("has no 'more', which the checkpoint holds", model={**tensors, "more": words})
    plain = next(key for key in model.state_dict() if key in tensors)
    refuses(f"has no '{plain}', which the model has", model={k: v for k, v in tensors.items() if k != plain})


def test_a_write_that_fails_leaves_the_old_file(tmp_path, monkeypatch):
    path = tmp_path / "x.pth.tar"
    path.write_text("old")

    def full(checkpoint: object, file: object) -> None:
        file.write(b"half of it")
        raise OSError("no space left")

    monkeypatch.setattr(torch, "save", full)
    with pytest.raises(OSError, match="no space"):
        write_legacy({}, path)
    assert path.read_text() == "old" and list(tmp_path.iterdir()) == [path]


def one_process_losses(folder: Path, text: Path, steps: int, batch: int) -> list[float]:
    """An ordinary loop over the same batches, with the loss of transformers."""
    from peft import LoraConfig, get_peft_model
    from transformers import AutoTokenizer

    tokenizer, model = AutoTokenizer.from_pretrained(folder), llm.load(folder)
    torch.manual_seed(0)
    model = get_peft_model(model, LoraConfig(r=8, lora_alpha=16, target_modules=["q_proj", "v_proj"])).train()
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.01)
    rows = [torch.tensor(tokenizer(part)["input_ids"]) for part in text.read_text().split("\n\n")]
    found = []
    for step in range(steps):
        ids = torch.stack([rows[(step * batch + i) % len(rows)] for i in range(batch)])
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.item())
    return found


def sends_what_gloo_refuses() -> bool:
    """torch 2.9's stages greet each other with an int64, and wait for a float32."""
    from torch.distributed.pipelining import PipelineStage

    greeting = inspect.getsource(PipelineStage._get_init_p2p_neighbors_ops)
    return "torch.tensor(self.stage_index, device=self.device)" in greeting


@pytest.mark.slow
@pytest.mark.skipif(bool(PEFT), reason=PEFT)
@pytest.mark.skipif(
    sends_what_gloo_refuses(), reason="the pipelines of this torch do not run on a CPU (as in 2.9)"
)
def test_two_pipeline_stages_train_as_one_process_does(tmp_path):
    model_dir, text = model_folder(tmp_path)
    llm.quantize(model_dir, save=tmp_path / "out", method="rtn", group_size=32)
    target = str(ROOT / "examples" / "llm" / "finetune_pp.py")
    start = tmp_path / "start.py"  # the shim has to come before transformers
    start.write_text(
        f"import runpy, zoo_shim; zoo_shim.install(); runpy.run_path({target!r}, run_name='__main__')"
    )
    command = [
        sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2",
        str(start), str(tmp_path / "out"),
        "--data", str(text), "--batch_size", "8", "--micro_batch_size", "4", "--chunks", "2", "--steps", "4",
        "--cutoff_len", "24", "--lora_dropout", "0", "--learning_rate", "0.01", "--save", str(tmp_path / "adapter"),
    ]  # fmt: skip
    shim = str(ROOT / "tests" / "zoo")
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join([shim, *sys.path])}
    done = subprocess.run(command, capture_output=True, text=True, env=env, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    losses = [float(line.split()[-1]) for line in done.stdout.splitlines() if line.startswith("step ")]
    expected = one_process_losses(tmp_path / "out", text, 4, 8)
    assert len(losses) == 4 and losses == pytest.approx(expected, rel=1e-4)
    assert expected[-1] < expected[0] - 0.01
    from peft import PeftModel

    tuned = PeftModel.from_pretrained(llm.load(tmp_path / "out"), tmp_path / "adapter")
    names = {name for name, p in tuned.named_parameters() if "lora_B" in name and bool(p.any())}
    assert len(names) == 4  # q and v of both blocks: each was trained by another process
