"""`sparsebit llm`: a tiny Llama with a tokenizer of words, from its folder to an answer.

Needs transformers; what must work without it is tested at the end.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import math
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from llm_files import WORDS, tiny_llama

ROOT = Path(__file__).resolve().parents[2]
needs_transformers = pytest.mark.skipif(
    importlib.util.find_spec("transformers") is None,
    reason="transformers is not installed (pip install 'sparsebit[llm]')",
)


@pytest.fixture(scope="module")
def llama(tmp_path_factory) -> Path:
    return tiny_llama(tmp_path_factory.mktemp("llama"))


@needs_transformers
def test_quantize_eval_chat(llama, tmp_path, sparsebit):
    out = tmp_path / "w4"
    done = sparsebit(
        f"llm quantize {llama / 'model'} --data {llama / 'text.txt'} --group-size 16 --length 32 --samples 8 "
        f"-o {out} --json"
    )
    assert done.code == 0, done.err
    facts = json.loads(done.out)
    assert facts["average_bits"] == 4 and len(facts["layers"]) == 14

    done = sparsebit(f"llm eval {out} --data {llama / 'text.txt'} --length 32 --json")
    assert done.code == 0, done.err
    found = json.loads(done.out)
    assert found["predicted"] == 600 - math.ceil(600 / 32)
    assert found["perplexity"] == pytest.approx(reference(out, llama / "text.txt", 32), rel=1e-4)

    for style in ("html", "md", "json"):
        assert sparsebit(f"report {out} --format {style}").code == 0
    worst = min(json.loads((out / "report.json").read_text())["layers"], key=lambda x: x["own"])
    assert worst["own"] == pytest.approx(-10 * math.log10(max(x["error"] for x in facts["layers"].values())))
    page = (out / "report.html").read_text("utf-8")
    assert "14 at 4 bits" in page and worst["name"] in page and "--candidate-bits" in page
    check_page(page, facts)
    table = (out / "report.md").read_text("utf-8").partition("## Layers")[2].split("\n\n")[1].splitlines()
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in table]
    assert all(any(column[2:]) for column in zip(*cells)), "an empty column"

    done = sparsebit("llm", "chat", out, "--prompt", "the cat", "--max-tokens", "5", "--json")
    answer = json.loads(done.out)
    assert done.code == 0 and answer["tokens"] <= 5 and set(answer["answer"].split()) <= {*WORDS, "<unk>"}
    done = sparsebit("llm", "chat", out, "--prompt", "the cat", "--max-tokens", "5")
    assert done.out.startswith("the cat") and answer["answer"].strip() in done.out


def check_page(page: str, facts: dict) -> None:
    """Perplexity, sizes and readers come first, and no column is empty."""
    tiles = page.partition("</dl>")[0]
    measured = facts["measured"]
    assert f"{measured['before']:.4g} → {measured['after']:.4g}" in tiles and "held-back tokens" in tiles
    assert "% of the size" in tiles
    assert "<dd>runs</dd><p>logits equal</p>" in tiles and "<dd>refuses it</dd><p>groups of 16" in tiles
    assert [row["reader"] for row in facts["readers"]] == ["transformers", "vLLM"]
    body = page.partition('<section id="layers">')[2].partition("<tbody>")[2].partition("</tbody>")[0]
    rows = [re.findall(r"<td.*?>(.*?)</td>", line) for line in body.strip().splitlines()]
    assert len(rows) == 14 and all(any(column) for column in zip(*rows))


@needs_transformers
def test_a_collapse_is_the_last_word_and_red(llama, tmp_path, sparsebit, monkeypatch):
    from sparsebit.llm.checks import quality

    monkeypatch.setattr(quality, "APART", 0.0)  # any change is a collapse
    words = f"llm quantize {llama / 'model'} --data {llama / 'text.txt'} --length 32 --samples 8 --bits 4"
    done = sparsebit(f"{words} -o {tmp_path / 'a'}")
    lines = done.err.strip().splitlines()
    assert done.code == 0 and lines[-1].startswith("warning: the model has collapsed: perplexity "), done.err
    assert "group_size=32" in lines[-1] and "\x1b" not in done.err
    assert done.out.strip().splitlines()[-2].startswith("perplexity ")
    monkeypatch.setattr("sys.stderr.isatty", lambda: True, raising=False)
    done = sparsebit(f"{words} -o {tmp_path / 'b'} --json --no-progress")
    assert "\x1b[1;31mwarning: the model has collapsed" in done.err
    assert json.loads(done.out)["warning"].startswith("the model has collapsed")
    for style in ("html", "md"):
        assert sparsebit(f"report {tmp_path / 'b'} --format {style}").code == 0
    page = (tmp_path / "b" / "report.html").read_text("utf-8")
    assert '<div class="tile failed"><dt>Perplexity</dt>' in page and '<p class="bad warning">' in page
    assert "**Warning**: the model has collapsed" in (tmp_path / "b" / "report.md").read_text("utf-8")


def reference(folder: Path, text: Path, length: int) -> float:
    """The formula, written down again."""
    from sparsebit import llm

    transformers = importlib.import_module("transformers")
    tokens = transformers.AutoTokenizer.from_pretrained(folder)(text.read_text())["input_ids"]
    model, losses = llm.load(folder), []
    for start in range(0, len(tokens), length):
        row = torch.tensor([tokens[start : start + length]])
        with torch.no_grad():
            scores = model(row).logits[0].double().log_softmax(-1)
        losses += [-scores[i, row[0, i + 1]].item() for i in range(row.shape[1] - 1)]
    return math.exp(sum(losses) / len(losses))


@needs_transformers
def test_float_models_and_tokens(llama, tmp_path, sparsebit):
    """Widths by layer, no data for rtn, tokens as an array, and the float model for comparison."""
    tokens = np.random.default_rng(1).integers(4, 22, (6, 24))
    np.save(tmp_path / "tokens.npy", tokens)
    data, model = tmp_path / "tokens.npy", llama / "model"
    done = sparsebit(
        f"llm quantize hf:{model} --data {data} --candidate-bits 2,4,8 --average-bits 4 --group-size 16 "
        f"--format gptq -o {tmp_path / 'mixed'}"
    )
    assert done.code == 0, done.err
    assert "written to" in done.out
    done = sparsebit(
        f"llm quantize {model} --method rtn --bits 8 --group-size 16 -o {tmp_path / 'rtn'} --json"
    )
    assert done.code == 0 and json.loads(done.out)["average_bits"] == 8
    values = [
        json.loads(sparsebit(f"llm eval {folder} --data {data} --json").out)["perplexity"]
        for folder in (model, tmp_path / "rtn")
    ]
    assert values[0] == pytest.approx(values[1], rel=0.01) and values[0] != values[1]


@needs_transformers
def test_talking_line_by_line(llama, sparsebit, monkeypatch):
    lines = ["the cat", "", "a big dog"]

    def type_line(prompt: str) -> str:
        if not lines:
            raise EOFError  # Ctrl-D
        return lines.pop(0)

    monkeypatch.setattr("builtins.input", type_line)
    done = sparsebit("llm", "chat", llama / "model", "--max-tokens", "3")
    assert done.code == 0 and "the cat" in done.out and "a big dog" in done.out


BAD = {
    "llm quantize nowhere -o out": ["nowhere: is not a folder with a config.json"],
    "llm quantize {model} -o out": ["gptq needs calibration data"],
    "llm quantize {model} --data no.txt -o out": ["no.txt: no such file", ".npy"],
    "llm quantize {model} --data empty.txt -o out": ["empty.txt: has 0 tokens"],
    "llm quantize {model} --data bytes.txt -o out": ["bytes.txt: not a text file in UTF-8"],
    "llm quantize {model} --data floats.npy -o out": ["floats.npy: holds float64 of shape 2x3"],
    "llm quantize {model} --data other.npy -o out": ["the token 99, but the model knows 32", "tokenizer"],
    "llm quantize {model} --data five.txt -o out": ["5 tokens are too few", "give 16 or more", "thousand"],
    "llm quantize {model} --data text.txt --length 65 -o out": [
        "--length 65: the model was made for 64 tokens"
    ],
    "llm quantize {model} --data long.npy -o out": ["long.npy: has sequences of 65 tokens", "made for 64"],
    "llm quantize {model} --data below.npy -o out": ["the token -1, but the model knows 32"],
    "llm quantize {model} --data text.txt --group-size 96 -o out": ["128 inputs", "not a multiple of 96"],
    "llm quantize broken --data text.txt -o out": ["broken/model.safetensors: cannot be read", "again"],
    "llm quantize bare --data text.txt -o out": ["bare: holds no tokenizer, which a text needs", ".npy"],
    "llm quantize text.txt --data text.txt -o out": [
        "text.txt: is not a folder",
        "that the file was made from",
    ],
    "llm eval {model} --data text.txt --length 65": ["--length 65: the model was made for 64 tokens"],
    "llm eval {model} --data other.npy": ["the token 99, but the model knows 32"],
    "llm quantize {model} --data text.txt --bits 5 -o out": ["bits: must be among", "got 5"],
    "llm quantize {model} --data text.txt --method gtpq -o out": ["did you mean gptq?"],
    "llm quantize {model} --data text.txt --format awq -o out": ["format", "known:"],
    "llm quantize {model} --data text.txt --candidate-bits two -o out": [
        "--candidate-bits: expected 2,3,4, got 'two'"
    ],
    "llm quantize {model} --data text.txt -o full": ["--output full: is not empty", "--resume"],
    "llm quantize {model} --data rows.jsonl -o out": ["rows.jsonl: is not plain text", "one .txt file"],
    "llm quantize {model} --data texts -o out": ["texts: is a folder without .npz files"],
    "llm quantize adapter --data text.txt -o out": ["adapter: is not a folder", "adapter of PEFT; merge it"],
    "llm quantize comma --data text.txt -o out": ["comma/config.json: cannot be read", "again"],
    "llm quantize half --data text.txt -o out": ["model-2.safetensors: is missing", "names it; download it"],
    "llm quantize newer --data text.txt -o out": ["knows no model type 'gpt9'; a newer version may"],
    "llm quantize coded --data text.txt -o out": [
        "'mine'; the code in the folder is not run",
        "load the model",
    ],
    "llm quantize vision -o out --method rtn": [
        "names no class under architectures",
        "'vit' is not a language",
    ],
    "llm quantize {model} --data text.txt --candidate-bits 2,4 --average-bits 9 -o out": [
        "average_bits: must lie between the widths to choose from (2, 4), got 9.0"
    ],
    "llm quantize {model} --data text.txt --damping -1 -o out": ["damping: must be above 0, got -1.0"],
    "llm quantize {model} --data text.txt --refine -1 -o out": ["refine: must be 0 or more, got -1"],
    "llm quantize {model} --data text.txt --method wanda --pattern 4:2 -o out": [
        "pattern: must be (n, m) with 0"
    ],
    "llm quantize {model} --data unnamed -o out": ["holds ids, but the model's forward takes input_ids, "],
    "llm quantize {model} --data floats.npz -o out": ["input_ids is float32 of shape 8x32; tokens are int64"],
    "llm quantize {model} --data scalar.npz -o out": [
        "input_ids is int64 of shape ()",
        "(sequences, length)",
    ],
    "llm quantize {model} --data masked.npz -o out": ["attention_mask is 4x32, but input_ids is 8x32"],
    "llm quantize {model} --data none.npz -o out": ["batch 0 is empty"],
    "llm quantize {model} --data text.txt --method smoothquant --bits 4 -o out": [
        "int-quantized: holds whole rows of 8 bits"
    ],
    "llm quantize {model} --data text.txt --method smoothquant --format gptq -o out": [
        "format: gptq has no place for 8-bit activations, which smoothquant is for"
    ],
    "llm eval {model}": ["--data: perplexity of which text?"],
    "llm eval deep --data text.txt": [
        "deep: 9 tensors of the model are not in its files, such as model.layers.2."
    ],
    "llm eval full --data text.txt": ["full: is not a folder with a config.json"],
    "llm chat {model} --json": ["--json: needs a --prompt"],
    "llm chat bare --prompt hello": ["bare: holds no tokenizer, which a text needs"],
}


def _more_folders(model: Path) -> None:
    """Rows of a table, a folder of texts, and models that are incomplete or unknown."""
    Path("rows.jsonl").write_text('{"text": "the cat sees a dog"}\n' * 100)
    for name in ("texts", "adapter", "unnamed"):
        Path(name).mkdir()
    ids = np.ones((8, 32), int)
    np.savez("unnamed/a.npz", ids=ids)
    np.savez("floats.npz", input_ids=ids.astype(np.float32))
    np.savez("scalar.npz", input_ids=np.array(3))
    np.savez("masked.npz", input_ids=ids, attention_mask=ids[:4])
    np.savez("none.npz")
    Path("texts/a.txt").write_text("the cat sees a dog")
    Path("adapter/adapter_config.json").write_text("{}")
    changes = {
        "newer": {"model_type": "gpt9"},
        "coded": {"model_type": "mine", "auto_map": {"AutoModelForCausalLM": "mine.Mine"}},
        "vision": {"model_type": "vit", "architectures": None},
        "deep": {"num_hidden_layers": 3},
    }
    for name in ("comma", "half", *changes):
        shutil.copytree(model, name)
        config = json.loads((model / "config.json").read_text()) | changes.get(name, {})
        Path(name, "config.json").write_text(json.dumps(config))
    Path("comma/config.json").write_text('{"model_type": "llama",}')
    Path("half/model.safetensors").rename("half/model-1.safetensors")
    index = {"weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors"}}
    Path("half/model.safetensors.index.json").write_text(json.dumps(index))


@needs_transformers
@pytest.mark.parametrize("command", BAD)
def test_bad_inputs(llama, tmp_path, monkeypatch, sparsebit, command):
    monkeypatch.chdir(tmp_path)
    Path("text.txt").write_text((llama / "text.txt").read_text())
    Path("empty.txt").write_text("")
    Path("bytes.txt").write_bytes(b"\xff\xfe\x00")
    np.save("floats.npy", np.zeros((2, 3)))
    np.save("other.npy", np.full((2, 8), 99))
    np.save("below.npy", np.full((2, 8), -1))
    np.save("long.npy", np.ones((2, 65), int))
    Path("five.txt").write_text("the cat sees a dog")
    for name in ("full", "bare"):
        Path(name).mkdir()
    Path("full/notes").write_text("mine")
    shutil.copytree(llama / "model", "broken")
    whole = Path("broken/model.safetensors")
    whole.write_bytes(whole.read_bytes()[:-8])
    Path("bare/config.json").write_text((llama / "model/config.json").read_text())
    _more_folders(llama / "model")
    done = sparsebit(command.format(model=llama / "model"))
    lines = done.err.strip().splitlines()
    assert done.code == 2 and len(lines) == 1, done.err
    assert not [words for words in BAD[command] if words not in lines[0]], lines[0]
    assert not Path("out").exists()


def test_missing_transformers(tmp_path, sparsebit, monkeypatch):
    real = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *rest: None if name == "transformers" else real(name, *rest)
    )
    (tmp_path / "config.json").write_text("{}")
    for words in (["quantize", tmp_path, "-o", tmp_path / "out"], ["eval", tmp_path], ["chat", tmp_path]):
        done = sparsebit("llm", *words)
        assert done.code == 2 and "pip install 'sparsebit[llm]'" in done.err


@needs_transformers
@pytest.mark.slow
def test_ctrl_c_leaves_blocks_that_are_not_made_again(llama, tmp_path):
    """SIGINT as soon as the first block is on disk; the end is the same as without."""
    words = ["llm", "quantize", str(llama / "model"), "--data", str(llama / "text.txt"), "--group-size", "16",
             "--length", "32", "--samples", "8", "-o"]  # fmt: skip
    start = (
        "import sys; sys.path.insert(0, {zoo!r}); __import__('zoo_shim').install()\n"
        "import sparsebit.llm.checkpoints.store as store, time\nwrite = store.Store.write\n"
        "def slow(self, block, *rest):\n    write(self, block, *rest)\n    time.sleep({wait})\n"
        "store.Store.write = slow\n"
        "from sparsebit.cli import main\nsys.exit(main())"
    )
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), os.environ.get("PYTHONPATH", "")])}

    def begin(wait: int, *more: str) -> subprocess.Popen:
        code = start.format(zoo=str(ROOT / "tests/zoo"), wait=wait)
        return subprocess.Popen(
            [sys.executable, "-c", code, *words, *more], stderr=subprocess.PIPE, stdout=subprocess.PIPE,
            text=True, env=env,
        )  # fmt: skip

    whole, cut = tmp_path / "whole", tmp_path / "cut"
    process = begin(60, str(cut))
    for _ in range(2400):  # a busy machine takes a minute and more
        if list(cut.glob("*.safetensors")) or process.poll() is not None:
            break
        time.sleep(0.1)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 130 and "Traceback" not in err, err
    again = err.strip().splitlines()[-1].strip()
    assert again == f"sparsebit {shlex.join([*words, str(cut)])} --resume"
    stamp = next(cut.glob("*.safetensors")).stat().st_mtime_ns
    for folder, more in ((cut, ["--resume"]), (whole, [])):
        process = begin(0, str(folder), *more)
        _, err = process.communicate(timeout=300)
        assert process.returncode == 0, err
    assert stamp in [file.stat().st_mtime_ns for file in cut.glob("*.safetensors")]
    for file in whole.glob("*.safetensors"):
        assert file.read_bytes() == (cut / file.name).read_bytes()
