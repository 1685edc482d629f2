"""The scripts with the original's names run, and give what they say."""

from __future__ import annotations

import importlib.util
import json
import os
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from test_walk import tiny, tokens

from sparsebit import llm
from sparsebit.llm.legacy import from_legacy, to_legacy

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
    vocabulary = {w: i for i, w in enumerate(["<unk>", "<s>", "</s>", "<pad>", *words])}
    plain = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    plain.pre_tokenizer = pre_tokenizers.Whitespace()
    model_dir = tmp_path / "model"
    PreTrainedTokenizerFast(tokenizer_object=plain, unk_token="<unk>").save_pretrained(model_dir)
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4}
    LlamaForCausalLM(LlamaConfig(vocab_size=64, **sizes)).save_pretrained(model_dir)
    text = tmp_path / "text.txt"
    drawn = torch.randint(0, 60, (400,), generator=torch.Generator().manual_seed(0)).tolist()
    rows = [" ".join(words[i] for i in drawn[at : at + 20]) for at in range(0, 400, 20)]
    text.write_text("\n\n".join(rows))
    return model_dir, text


@pytest.mark.skipif(bool(missing("transformers")), reason=missing("transformers"))
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


@pytest.mark.slow
@pytest.mark.skipif(bool(PEFT), reason=PEFT)
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
