"""Towers: which are found, which are quantized, and that each sees what the quantized ones before it give."""

from __future__ import annotations

import copy
import importlib
import importlib.util
import sys
from pathlib import Path

import pytest
import torch
from tiny_transformers import ARCHITECTURES, batch_of, forced, words
from torch import nn

from sparsebit import llm
from sparsebit.errors import CalibrationError, ConfigError

if importlib.util.find_spec("transformers") is None:
    pytest.skip("transformers is not installed (pip install sparsebit[llm])", allow_module_level=True)

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "zoo"))
__import__("zoo_shim").install()  # before transformers looks for torchvision
transformers = importlib.import_module("transformers")

T5, WHISPER, LLAVA = (f"{name}ForConditionalGeneration" for name in ("T5", "Whisper", "Llava"))
BY_DEFAULT = {
    "T5": ["encoder.block", "decoder.block"],
    "Bart": ["model.encoder.layers", "model.decoder.layers"],
    "Pegasus": ["model.encoder.layers", "model.decoder.layers"],
    "Whisper": ["model.encoder.layers", "model.decoder.layers"],
    "Llava": ["model.language_model.layers"],
    "Qwen2VL": ["model.language_model.layers"],
    "Gemma3": ["model.language_model.layers"],
    "PaliGemma": ["model.language_model.layers"],
    "SmolVLM": ["model.text_model.layers"],
}
OPTIONS = {"bits": 8, "group_size": 32}


def build(name: str, **changes):
    """A model, and two batches of which the second is shorter."""
    model, batch = ARCHITECTURES[name](**changes)
    other = batch_of(name, 3)
    if "decoder_input_ids" in other:
        other["decoder_input_ids"] = other["decoder_input_ids"][:, :7]
    return model, [batch, other]


def logits(model, batch) -> torch.Tensor:
    with torch.no_grad():
        return model(**batch).logits


def change(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a - b).square().mean() / b.square().mean())


def paths(layout) -> list[str]:
    return [tower.path for tower in layout.towers]


@pytest.mark.parametrize("name", BY_DEFAULT)
def test_what_is_quantized_unless_something_is_said(name):
    model, _ = build(f"{name}ForConditionalGeneration")
    layout = llm.find_blocks(model)
    assert paths(layout) == BY_DEFAULT[name]
    every = llm.find_blocks(model, towers="all")
    assert len(every.towers) == 2 and len(every.towers) == len(layout.towers) + len(layout.left)
    if layout.left:
        assert f"blocks in {layout.left[0].path!r}" in str(layout) and "towers=" in str(layout)


@pytest.mark.parametrize("name", [f"{name}ForConditionalGeneration" for name in BY_DEFAULT])
def test_every_tower_of_every_model(name, tmp_path):
    """With a processor's batches; reloaded without a model."""
    model, batches = build(name)
    report = llm.quantize(model, batches, save=tmp_path, towers="all", refine=0, **OPTIONS, **forced(name))
    assert len(report.layout.towers) == 2 and len(report.layout) == 4
    assert all("error" in about for about in report.layers.values())
    loaded = llm.load(tmp_path)
    quantized = {n for n, m in loaded.named_modules() if isinstance(m, llm.QuantLinear)}
    assert quantized == set(report.layers)
    assert 0 < change(logits(loaded, batches[0]), logits(model, batches[0])) < 1e-3


def test_towers_are_chosen_by_parts_of_their_names(tmp_path):
    model, batches = build(LLAVA)
    report = llm.quantize(model, batches, save=tmp_path, towers="vision_tower", **OPTIONS)
    assert all("vision_tower" in name for name in report.layers) and len(report.layers) == 12
    assert "float: 2 blocks in 'model.language_model.layers'" in str(report)
    assert paths(llm.find_blocks(model, towers=["language_model", "vision_tower"])) == [
        "model.vision_tower.encoder.layers",
        "model.language_model.layers",
    ]
    for asked, why in (("vision", "no tower is called 'vision'; there are: "), ([], "is empty")):
        with pytest.raises(ConfigError, match=why):
            llm.find_blocks(model, towers=asked)
    with pytest.raises(ConfigError, match="give one of them"):
        llm.find_blocks(model, "model.language_model.layers", towers="all")


@pytest.mark.parametrize("name", [T5, WHISPER, LLAVA])
def test_a_tower_sees_what_the_quantized_one_before_it_gives(name, tmp_path):
    """The second tower is solved as in a model whose first one is quantized already."""
    model, batches = build(name)
    whole = llm.quantize(
        model, batches, save=tmp_path / "whole", towers="all", bits=3, group_size=32, **forced(name)
    )
    first, second = whole.layout.towers
    llm.quantize(
        model, batches, save=tmp_path / "first", towers=first.path, bits=3, group_size=32, **forced(name)
    )
    half = copy.deepcopy(model)
    for layer, module in llm.load(tmp_path / "first").named_modules():
        if isinstance(module, llm.QuantLinear):
            half.get_submodule(layer).weight.data = module.dequantize(torch.float32)
    report = llm.quantize(
        half, batches, save=tmp_path / "second", towers=second.path, bits=3, group_size=32, **forced(name)
    )
    for layer, about in report.layers.items():
        assert about["error"] == pytest.approx(whole.layers[layer]["error"], rel=1e-3), layer


@pytest.mark.parametrize("layer", [-1, -2, [-2, -3]])
def test_outputs_of_inner_blocks_that_the_model_reads(layer, tmp_path):
    """LLaVA takes the pictures from the last block but one, or from several."""
    settings = copy.deepcopy(ARCHITECTURES[LLAVA].config)
    settings["vision_config"]["num_hidden_layers"] = 4
    model, batches = build(LLAVA, **{**settings, "vision_feature_layer": layer})
    llm.quantize(model, batches, save=tmp_path, towers="all", refine=0, **OPTIONS)
    assert change(logits(llm.load(tmp_path), batches[0]), logits(model, batches[0])) < 1e-3
    from sparsebit.llm.models.sources import InMemory
    from sparsebit.llm.walk.data import Data
    from sparsebit.llm.walk.relay import Relay

    relay = Relay(InMemory(model, towers="all"), Data(batches, [], True), None, False)
    expected = {-1: set(), -2: {2}}.get(layer if isinstance(layer, int) else 0, {1, 2})
    assert relay.needed[relay.order[0]] == expected


@pytest.mark.parametrize("options", [
    {"match_float": True}, {"spill": True}, {"method": "awq"}, {"method": "rtn", "format": "gptq"},
])  # fmt: skip
def test_other_ways_through_two_towers(options, tmp_path):
    model, batches = build(WHISPER)
    llm.quantize(model, batches, save=tmp_path, **{**OPTIONS, **options})
    assert change(logits(llm.load(tmp_path), batches[0]), logits(model, batches[0])) < 1e-3


def test_widths_are_chosen_over_both_towers(tmp_path):
    model, batches = build(T5)
    report = llm.quantize(
        model,
        batches,
        save=tmp_path,
        candidate_bits=(3, 8),
        average_bits=5.0,
        group_size=32,
        refine=0,
        force=True,
    )  # transformers cannot unpack T5 by more than one scheme
    assert len({about["bits"] for about in report.layers.values()}) == 2 and report.average_bits <= 5.0


def test_a_run_that_was_killed_between_towers_ends_in_the_same_bytes(tmp_path, monkeypatch):
    from sparsebit.llm.checkpoints.store import Store

    model, batches = build(T5)
    llm.quantize(model, batches, save=tmp_path / "a", match_float=True, **OPTIONS, **forced(T5))
    write, left = Store.write, [3]

    def dying(self, *args):
        left[0] -= 1
        if left[0] < 0:
            raise KeyboardInterrupt
        write(self, *args)

    monkeypatch.setattr(Store, "write", dying)
    with pytest.raises(KeyboardInterrupt):
        llm.quantize(model, batches, save=tmp_path / "b", match_float=True, **OPTIONS, **forced(T5))
    monkeypatch.setattr(Store, "write", write)
    llm.quantize(model, batches, save=tmp_path / "b", match_float=True, **OPTIONS, **forced(T5))
    for path in sorted((tmp_path / "a").glob("*.safetensors")):
        assert path.read_bytes() == (tmp_path / "b" / path.name).read_bytes(), path.name


def test_blocks_that_share_a_layer_are_refused(tmp_path):
    """Zamba-2 has one transformer for several blocks; it was solved twice, then the folder could not be loaded."""
    model, batches = build("LlamaForCausalLM")
    model.model.layers[1].mlp.up_proj.weight = model.model.layers[0].mlp.up_proj.weight
    with pytest.raises(ConfigError, match=r"'model.layers.0.mlp.up_proj.weight' and .*are one matrix"):
        llm.quantize(model, batches, save=tmp_path / "out", **OPTIONS)
    assert not (tmp_path / "out").exists()


def test_data_that_does_not_reach_a_tower(tmp_path):
    model, _ = build(LLAVA)
    with pytest.raises(CalibrationError, match=r"does not reach 'model.vision_tower.*pixel_values"):
        llm.quantize(model, [{"input_ids": words()}], save=tmp_path / "a", towers="all", **OPTIONS)
    report = llm.quantize(model, [words()], save=tmp_path / "b", **OPTIONS)  # text alone does for words
    assert len(report.layers) == 14


def test_what_stands_beside_the_weights_goes_along(tmp_path):
    model, _ = build(LLAVA)
    model.save_pretrained(tmp_path / "float")
    for name in ("preprocessor_config.json", "processor_config.json", "chat_template.jinja"):
        (tmp_path / "float" / name).write_text("{}")
    llm.quantize(tmp_path / "float", save=tmp_path / "out", method="rtn", **OPTIONS)
    assert (tmp_path / "out" / "preprocessor_config.json").is_file()
    assert (tmp_path / "out" / "processor_config.json").is_file()


def test_two_towers_cannot_be_rotated(tmp_path):
    model, batches = build(LLAVA)
    with pytest.raises(ConfigError, match="more than one tower"):
        llm.quantize(model, batches, save=tmp_path, rotate=True, **OPTIONS)


# -- what counts as a layer ------------------------------------------------------------------------------------------
class Twice(nn.Linear):
    def forward(self, x):
        return 2 * super().forward(x)


class Renamed(nn.Linear):
    def forward(self, input):
        out = input @ self.weight.T
        return out if self.bias is None else out + self.bias


class Net(nn.Module):
    """Blocks of one kind of layer; `between` is done to the hidden state between blocks."""

    class Block(nn.Module):
        def __init__(self, kind) -> None:
            super().__init__()
            self.a, self.b = kind(16, 16), kind(16, 16, bias=False)

        def forward(self, x):
            return x + self.b(torch.tanh(self.a(x)))

    def __init__(self, kind=nn.Linear, between=lambda x: x) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.between = nn.Embedding(50, 16), between
        self.blocks = nn.ModuleList(self.Block(kind) for _ in range(3))
        self.norms = nn.ModuleList(nn.LayerNorm(16) for _ in range(3))

    def forward(self, ids):
        x = self.embed(ids)
        for block in self.blocks:
            x = block(self.between(x))
        return x


def test_classes_made_from_linear_count_if_they_compute_the_same(tmp_path):
    assert len(llm.find_blocks(Net(Renamed)).names()) == 6
    with pytest.raises(ConfigError, match="no ModuleList of decoder blocks"):
        llm.find_blocks(Net(Twice))
    batches = [torch.randint(50, (4, 12)) for _ in range(2)]
    report = llm.quantize(Net(Renamed), batches, save=tmp_path, bits=8, group_size=16)
    assert len(report.layers) == 6 and "6 layers" in str(report)


@pytest.mark.parametrize("net", [Net(Twice), Net()])
def test_a_list_without_layers_is_refused(net, tmp_path):
    with pytest.raises(ConfigError, match="'norms' has no Linear layer in any of its 3 blocks"):
        llm.quantize(net, save=tmp_path, method="rtn", blocks="norms", group_size=16)
    assert not list(tmp_path.iterdir())


def test_a_model_that_changes_the_stream_between_blocks_is_refused(tmp_path):
    """RWKV halves it every six blocks; block by block that would be lost without a word."""
    batches = [torch.randint(50, (4, 12))]
    with pytest.raises(
        CalibrationError, match="blocks: the model changes the hidden state between block 0 and"
    ):
        llm.quantize(Net(between=lambda x: x / 2), batches, save=tmp_path, group_size=16)


def test_a_layer_that_is_never_called_stays_float(tmp_path, caplog):
    """Mamba reads the weight of dt_proj itself."""
    model, batches = build("MambaForCausalLM")
    options = {**OPTIONS, "group_size": -1}  # its 4 inputs would not fit a group
    report = llm.quantize(model, batches, save=tmp_path, **options)
    assert not any("dt_proj" in name for name in report.layers) and "dt_proj: the block never" in caplog.text
    loaded = llm.load(tmp_path)
    assert type(loaded.backbone.layers[0].mixer.dt_proj) is nn.Linear
    assert change(logits(loaded, batches[0]), logits(model, batches[0])) < 1e-3
    again = llm.quantize(model, batches, save=tmp_path, **options)
    assert again.layers == report.layers and again.average_bits == 8


def test_outputs_that_the_block_writes_into(tmp_path):
    """Falcon adds the attention's output to the MLP's in place: the float model's outputs were taken after that."""
    model, batches = build("FalconForCausalLM")
    report = llm.quantize(
        model, batches, save=tmp_path, group_size=32, match_float=True, blocks="transformer.h"
    )
    assert "8 layers at 4.00 bits" in str(report)  # FalconLinear is a Linear: there were 0 layers
    assert change(logits(llm.load(tmp_path), batches[0]), logits(model, batches[0])) < 2e-3  # it was 5e-2
