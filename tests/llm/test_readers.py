"""The reader's certificate: transformers, in a process without Sparsebit, gives the logits of `llm.load`.

Or it refused before the run began, and it was right: it does not run the folder that `force` writes. No third outcome.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import sys
from pathlib import Path

import pytest
import torch
from tiny_transformers import ARCHITECTURES, SIZES, is_refused, words

from sparsebit import llm
from sparsebit.errors import ConfigError, ExportError, ReaderError

for package in ("transformers", "compressed_tensors", "accelerate"):
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"{package} is not installed (pip install sparsebit[llm])", allow_module_level=True)

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "zoo"))
__import__("zoo_shim").install()  # before transformers looks for torchvision
transformers = importlib.import_module("transformers")
transformers.utils.logging.disable_progress_bar()
safetensors = importlib.import_module("safetensors.torch")
readers = importlib.import_module("sparsebit.llm.readers")
clean = importlib.import_module("sparsebit.llm.readers.clean")

LLAMA = "LlamaForCausalLM"
BY_GPTQ = {LLAMA, "MixtralForCausalLM", "WhisperForConditionalGeneration", "Qwen2VLForConditionalGeneration"}


def theirs(folder: Path, batch: dict, place: Path) -> torch.Tensor:
    """Logits of transformers in the clean process; asked here, not taken from the report."""
    given, found = place / "inputs.safetensors", place / "logits.safetensors"
    safetensors.save_file({name: tensor.contiguous() for name, tensor in batch.items()}, given)
    config = json.loads((folder / "config.json").read_text())
    answer = clean.ask({
        "task": "run", "folder": str(folder), "inputs": str(given), "outputs": str(found),
        "architecture": config["architectures"][0], "extra": [],
    })  # fmt: skip
    if "error" in answer:
        raise ExportError(answer["error"])
    assert answer["clean"]
    wrong = {key: names for key, names in answer["info"].items() if names}
    if wrong:
        raise ExportError(str(wrong))
    return safetensors.load_file(found)["logits"]


def tensors_in(folder: Path) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = {}
    for path in sorted(folder.glob("*.safetensors")):
        found.update(safetensors.load_file(path))
    return found


def assert_conserved(before: Path, after: Path) -> None:
    """Every tensor of the source is there, as it was or packed, and nothing else is."""
    old, new = tensors_in(before), tensors_in(after)
    for key in set(old) & set(new):
        assert torch.equal(old[key], new[key]), key
    packed = {key.removesuffix(".weight_packed") for key in new if key.endswith(".weight_packed")}
    assert packed == {key.removesuffix(".weight") for key in set(old) - set(new)}
    parts = {
        f"{layer}.{leaf}" for layer in packed for leaf in ("weight_packed", "weight_scale", "weight_shape")
    }
    assert set(new) - set(old) == parts
    for layer in packed:
        assert sorted(new[f"{layer}.weight_shape"].tolist()) == sorted(old[f"{layer}.weight"].shape), layer


@pytest.mark.parametrize("source", ["object", "folder"])
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_it_runs_or_was_refused(name, source, tmp_path):
    model, batch = ARCHITECTURES[name]()
    model.save_pretrained(tmp_path / "float")
    given = model if source == "object" else tmp_path / "float"
    options = {"method": "gptq", "refine": 0} if name in BY_GPTQ else {"method": "rtn"}
    out = tmp_path / "out"
    refused = is_refused(name)
    if refused:
        with pytest.raises(ConfigError, match=r"transformers \S+ would not run this checkpoint: ") as error:
            llm.quantize(given, [batch], save=out, **options)
        assert not out.exists()  # before it began
        assert "(5.23 and later unpack layers while they load)" in str(error.value)
    report = llm.quantize(given, [batch], save=out, force=refused, **options)
    row = next(row for row in report.readers if row.reader == "transformers")
    assert row.version == transformers.__version__
    assert row.state == ("refused" if refused else "runs"), str(row)
    assert_conserved(tmp_path / "float", out)
    loaded = llm.load(out, dtype=torch.float32)
    assert type(loaded) is type(model)
    if refused:
        with pytest.raises(ExportError, match=r"'weight'|missing_keys"):
            theirs(out, batch, tmp_path)
        return
    with torch.no_grad():
        ours, floats = loaded(**batch).logits, model(**batch).logits
    assert (ours - floats).abs().max() > 1e-4  # it is the quantized model that was compared
    difference = (theirs(out, batch, tmp_path) - ours).norm() / ours.norm()
    assert difference < 1e-3  # where transformers unpacks, weights are rounded to the dtype of the scales


def test_experts_in_bfloat16_go_where_the_reader_sends_them(tmp_path):
    """transformers rounds unpacked experts to bfloat16; a token that goes to another expert is not a failure."""
    sizes = {"n_routed_experts": 32, "num_experts_per_tok": 4, "num_hidden_layers": 4, "hidden_size": 128}
    model, _ = ARCHITECTURES["DeepseekV3ForCausalLM"](**sizes)
    for parameter in model.parameters():
        parameter.data.mul_(3 if parameter.dim() > 1 else 1)
    batch = {"input_ids": torch.randint(3, 90, (2, 48))}
    report = llm.quantize(model.bfloat16(), [batch], save=tmp_path, method="rtn")
    assert report.readers[0].state == "runs"
    certificate = importlib.import_module("sparsebit.llm.checks.certificate")
    ours, logits = certificate._Ours(tmp_path, batch), theirs(tmp_path, batch, tmp_path)
    exact = ours.logits("experts")
    assert (logits - exact).norm() < 1e-5 * exact.norm() < (logits - ours.logits()).norm()


@pytest.mark.parametrize(("name", "stack"), [
    ("GptOss", "model.layers.0.mlp.experts.gate_up_proj"),
    ("GraniteMoeHybrid", "model.layers.0.block_sparse_moe.experts.0.gate_up_proj"),
])  # fmt: skip
def test_experts_that_stay_float_are_said(name, stack, tmp_path, caplog):
    """Before the work, in the report and on the card: without them the model is hardly smaller."""
    sizes = {"num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 16, "shared_intermediate_size": 64}
    kinds = ["full_attention" if name == "GptOss" else "attention"] * 2
    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(**SIZES, **sizes, layer_types=kinds)
    model = getattr(transformers, f"{name}ForCausalLM")(config).eval()
    report = llm.quantize(model, {"input_ids": words()}, save=tmp_path, method="rtn")
    inside = [p.numel() for p in model.model.layers.parameters() if p.dim() > 1]
    quantized = sum(report.sizes.values())
    assert report.left_share == 1 - quantized / sum(inside) > 0.5
    said = f"{report.left_share:.0%} of the weights in the blocks stay float, such as {stack}"
    assert said in caplog.text and said in str(report)
    card = (tmp_path / "README.md").read_text()
    assert f"stay float in the blocks | {sum(inside) - quantized:,} ({report.left_share:.0%})" in card
    assert report.readers[0].state == "runs"


def test_the_table_of_architectures_has_every_kind():
    kinds = {"dense", "conv1d", "moe", "mla", "ssm", "encoder-decoder", "vision-language"}
    assert {row.kind for row in ARCHITECTURES.values()} == kinds and len(ARCHITECTURES) >= 30


@pytest.mark.parametrize("options", [
    {"bits": 2}, {"bits": 3}, {"bits": 8}, {"symmetric": False}, {"group_size": -1}, {"format": "gptq"},
    {"method": "smoothquant"}, {"method": "wanda"}, {"candidate_bits": (2, 4), "average_bits": 3.0},
])  # fmt: skip
@pytest.mark.parametrize("name", [LLAMA, "Qwen3MoeForCausalLM"])
def test_no_option_gives_a_third_outcome(name, options, tmp_path):
    model, batch = ARCHITECTURES[name]()
    asked, out = {"method": "rtn", **options}, tmp_path / "out"
    try:
        report = llm.quantize(model, [batch], save=out, **asked)
    except ConfigError as error:
        assert "would not run this checkpoint: " in str(error) and name != LLAMA
        assert not out.exists()
        return
    row = next(row for row in report.readers if row.reader == "transformers")
    if row.state == "unknown":  # optimum reads it, which is not here
        assert options.get("format") == "gptq" and any(other.state == "fits" for other in report.readers)
        return
    assert row.state == "runs"
    with torch.no_grad():
        ours = llm.load(out, dtype=torch.float32)(**batch).logits
    assert (theirs(out, batch, tmp_path) - ours).norm() < 1e-3 * ours.norm()


# -- the reader that it is for ----------------------------------------------------------------------------------------
def test_what_only_another_reader_runs_needs_its_name(tmp_path):
    """optimum does not pack experts, vLLM does."""
    model, batch = ARCHITECTURES["Qwen3MoeForCausalLM"]()
    options = {"method": "rtn", "format": "gptq"}
    with pytest.raises(
        ConfigError, match=r"transformers .* would not run .*--reader: GPTQModel, vLLM\).*--force"
    ):
        llm.quantize(model, [batch], save=tmp_path / "a", **options)
    assert not (tmp_path / "a").exists()
    report = llm.quantize(model, [batch], save=tmp_path / "a", reader="vllm", **options)
    assert {row.reader: row.state for row in report.readers} == {
        "GPTQModel": "fits",
        "transformers": "refused",
        "vLLM": "fits",
    }


@pytest.mark.parametrize(("reader", "options", "reason"), [
    ("GPTQModel", {}, "GPTQModel would not run this checkpoint: it reads only gptq"),
    ("vLLM", {"bits": 2}, r"vLLM would not run this checkpoint: 2 bits, .*--reader: transformers"),
    ("vLLM", {"candidate_bits": (2, 3), "average_bits": 2.5}, r"vLLM would not run this checkpoint: "),
])  # fmt: skip
def test_the_reader_that_was_named_decides(reader, options, reason, tmp_path):
    model, batch = ARCHITECTURES[LLAMA]()
    with pytest.raises(ConfigError, match=reason):
        llm.quantize(model, [batch], save=tmp_path / "a", method="rtn", reader=reader, **options)
    assert not (tmp_path / "a").exists()
    llm.quantize(model, [batch], save=tmp_path / "a", method="rtn", reader=reader, force=True, **options)
    llm.load(tmp_path / "a")


def test_an_unknown_reader_is_one_line(tmp_path, capsys):
    from sparsebit.cli import main

    model, _ = ARCHITECTURES[LLAMA]()
    model.save_pretrained(tmp_path / "float")
    command = ["llm", "quantize", str(tmp_path / "float"), "--reader", "vlm", "-o", str(tmp_path / "a")]
    assert main(command) == 2
    said = capsys.readouterr().err
    assert "did you mean vllm" in said and len(said.strip().splitlines()) == 1


def test_576_inputs_run_without_a_word(tmp_path):
    """SmolLM2-135M: groups of 128 do not divide 576, so that nobody could load what was written."""
    sizes = {
        "hidden_size": 576,
        "intermediate_size": 1536,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
    }
    model, batch = ARCHITECTURES[LLAMA](**sizes)
    report = llm.quantize(model, [batch], save=tmp_path / "a", method="rtn")
    assert [row.state for row in report.readers if row.reader in ("transformers", "vLLM")] == ["runs", "fits"]
    groups = json.loads((tmp_path / "a" / "config.json").read_text())["quantization_config"]["config_groups"]
    assert {group["weights"]["group_size"] for group in groups.values()} == {64, 128}
    with pytest.raises(ConfigError, match="576 inputs, which is not a multiple of 128"):
        llm.quantize(model, [batch], save=tmp_path / "b", method="rtn", group_size=128)
    assert not (tmp_path / "b").exists()


# -- a reader that fails ----------------------------------------------------------------------------------------------
@pytest.fixture
def broken(monkeypatch):
    """transformers reads other weights than were written, as a defect of its loading would make it."""
    asked = clean.ask

    def ask(question):
        answer = asked(question)
        if question["task"] == "run":
            logits = safetensors.load_file(question["outputs"])["logits"]
            safetensors.save_file({"logits": -logits}, question["outputs"])
        return answer

    monkeypatch.setattr(clean, "ask", ask)


def test_a_reader_that_fails_is_an_error(broken, tmp_path, caplog):
    model, batch = ARCHITECTURES[LLAMA]()
    with pytest.raises(ReaderError, match=r"transformers \S+: failed: its logits differ .* by 200") as found:
        llm.quantize(model, [batch], save=tmp_path, method="rtn")
    assert "force=True" in str(found.value) and found.value.report.readers[0].state == "failed"
    card = (tmp_path / "README.md").read_text()
    assert "**Not certified.** transformers" in card and "from transformers import" not in card
    llm.load(tmp_path)  # the folder is kept
    report = llm.quantize(model, [batch], save=tmp_path, method="rtn", force=True)
    assert report.readers[0].state == "failed" and "failed: its logits differ" in caplog.text


def test_a_reader_that_fails_is_exit_code_1(broken, tmp_path, capsys):
    from sparsebit.cli import main

    model, _ = ARCHITECTURES[LLAMA]()
    model.save_pretrained(tmp_path / "float")
    command = ["llm", "quantize", str(tmp_path / "float"), "--method", "rtn", "--json"]
    assert main([*command, "-o", str(tmp_path / "a")]) == 1
    said = capsys.readouterr()
    assert json.loads(said.out)["ok"] is False and said.err.count("error: ") == 1
    assert main([*command, "-o", str(tmp_path / "b"), "--force"]) == 0
    assert json.loads(capsys.readouterr().out)["ok"] is True


def test_a_reader_that_ends_is_an_error(tmp_path, monkeypatch):
    """A process that the system ends for its memory, say."""
    model, batch = ARCHITECTURES[LLAMA]()
    asked = clean.ask

    def ask(question):
        if question["task"] == "run":
            raise ExportError("the process that reads the checkpoint ended without an answer")
        return asked(question)

    monkeypatch.setattr(clean, "ask", ask)
    with pytest.raises(ReaderError, match="ended without an answer"):
        llm.quantize(model, [batch], save=tmp_path, method="rtn")


# -- folders that cannot be read --------------------------------------------------------------------------------------
def shards(folder: Path) -> list[Path]:
    model, _ = ARCHITECTURES[LLAMA]()
    model.save_pretrained(folder, max_shard_size="60KB")
    return sorted(folder.glob("*.safetensors"))


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-8])


def scramble(path: Path) -> None:
    path.write_bytes(b"<html>404</html>")


def swap(path: Path) -> None:
    """Another file under this name."""
    safetensors.save_file({"other": torch.ones(2)}, path)


@pytest.mark.parametrize("harm", [cut, scramble, Path.unlink, swap])
@pytest.mark.parametrize("which", [0, -1])
def test_a_corrupt_shard_is_named(harm, which, tmp_path):
    path = shards(tmp_path)[which]
    harm(path)
    with pytest.raises(ConfigError) as found:
        llm.quantize(tmp_path, save=tmp_path / "out", method="rtn")
    assert path.name in str(found.value) and "again" in str(found.value) and "\n" not in str(found.value)


@pytest.mark.parametrize("name", ["config.json", "model.safetensors.index.json"])
@pytest.mark.parametrize("content", ["{", "[]", ""])
def test_a_corrupt_json_file_is_named(name, content, tmp_path, capsys):
    from sparsebit.cli import main

    shards(tmp_path)
    (tmp_path / name).write_text(content)
    assert main(["llm", "quantize", str(tmp_path), "-o", str(tmp_path / "out"), "--method", "rtn"]) == 2
    said = capsys.readouterr().err
    assert f"{name}: " in said and len(said.strip().splitlines()) == 1


def test_a_corrupt_shard_of_an_output_is_named(tmp_path):
    model, _ = ARCHITECTURES[LLAMA]()
    llm.quantize(model, save=tmp_path, method="rtn")
    cut(tmp_path / "model-block-00001.safetensors")
    with pytest.raises(ConfigError, match=r"model-block-00001.safetensors: cannot be read"):
        llm.load(tmp_path)


def test_a_torchvision_that_cannot_be_imported_is_named(tmp_path):
    """In a process of its own: transformers says "Could not import module 'LlamaConfig'"."""
    import os
    import subprocess

    (tmp_path / "torchvision").mkdir()
    (tmp_path / "torchvision" / "__init__.py").write_text(
        "raise RuntimeError('operator torchvision::nms does not exist')"
    )
    (tmp_path / "torchvision-0.0.dist-info").mkdir()
    (tmp_path / "torchvision-0.0.dist-info" / "METADATA").write_text("Name: torchvision\nVersion: 0.0\n")
    shards(tmp_path / "model")
    path = os.pathsep.join([str(tmp_path), str(Path(llm.__file__).parents[2])])
    command = [sys.executable, "-m", "sparsebit", "llm", "quantize", str(tmp_path / "model"), "-o"]
    done = subprocess.run(
        [*command, str(tmp_path / "out")],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 2
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith("error: transformers ") and "torchvision::nms" in last and "uninstall it" in last
