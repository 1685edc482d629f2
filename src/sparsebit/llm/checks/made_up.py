"""Inputs that are made up where there is no data, so that a checkpoint is run before anyone gets it.

Random pictures and sounds of the sizes in the config, beside random words. What a model takes is tried: of several
inputs, those count that run the most packed layers.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from sparsebit.llm.layers.linear import QuantLinear

WORDS = 16  # tokens of a text
KNOWN = 1000  # its tokens are among the first words of the vocabulary
SAMPLES = 16000  # of a sound: a second
FRAMES = 64  # of a spectrogram, where the config does not say how many
SIDE = 224  # of a picture, where the config does not say it
PIECES = (1, 2, 3, 5)  # that a picture may be cut into
Inputs = dict[str, Tensor]


def made_up(model: Any) -> tuple[Inputs, set[str]]:
    """The inputs that run the most packed layers, and the names of these layers; neither where nothing runs."""
    best: tuple[Inputs, set[str]] = {}, set()
    packed = {name for name, module in model.named_modules() if isinstance(module, QuantLinear)}
    for inputs in _candidates(model):
        ran = _run(model, inputs)
        if ran is not None and (not best[0] or len(ran) > len(best[1])):
            best = inputs, ran
        if best[0] and best[1] >= packed:
            break
    return best


@torch.no_grad()
def _run(model: nn.Module, inputs: Inputs) -> set[str] | None:
    """The packed layers that these inputs reach; None where the model does not take the inputs."""
    ran: set[str] = set()
    hooks = [
        module.register_forward_pre_hook(lambda *_, name=name: ran.add(name))
        for name, module in model.named_modules()
        if isinstance(module, QuantLinear)
    ]
    try:
        model(**inputs)
    except Exception:  # these are guesses: any error of the model means that it does not take them
        return None
    finally:
        for hook in hooks:
            hook.remove()
    return ran


def _candidates(model: Any) -> Iterator[Inputs]:
    """The richest first; words alone last."""
    config = model.config
    takes = set(inspect.signature(model.forward).parameters)
    if config.is_encoder_decoder and "input_ids" not in takes:
        names = ["decoder_input_ids"]
    else:
        names = ["input_ids"]
    if "input_ids" in names and config.is_encoder_decoder and "decoder_input_ids" in takes:
        names.append("decoder_input_ids")
    ids = _words(config)
    for shown in (*_pictures(model, takes), *_sounds(config, takes)):
        # some put more behind the first by themselves
        for size in dict.fromkeys((_places(model, shown), 1, 0)):
            token = _token(config, "audio" if "input_features" in shown else "image")
            yield {**shown, **_text(config, takes, names, ids, (token, size))}
        if config.is_encoder_decoder:
            yield {**shown, "decoder_input_ids": ids}
        yield shown
    yield dict.fromkeys(names, ids)


def _words(config: Any) -> Tensor:
    """Tokens of a text, none of which stands for something else."""
    text = config.get_text_config(decoder=True)
    size = min(getattr(text, "vocab_size", 0) or KNOWN, KNOWN)
    special = set()
    for c in (config, text):
        for key, value in vars(c).items():
            if key.endswith(("_id", "_index")) and isinstance(value, int):
                special.add(value)
    plain = [i for i in range(size) if i not in special] or [0]
    return torch.tensor([plain[7 * i % len(plain)] for i in range(WORDS)])[None]


def _token(config: Any, kind: str) -> int | None:
    """The one that stands for a piece of a picture or a sound."""
    found = (getattr(config, f"{kind}_token_{end}", None) for end in ("id", "index"))
    return next((token for token in found if isinstance(token, int)), None)


def _text(
    config: Any, takes: set[str], names: list[str], ids: Tensor, pieces: tuple[int | None, int]
) -> Inputs:
    """Words behind as many tokens as a picture takes, and what some models want to know about them."""
    token, places = pieces
    if token is None:
        first = ids
    else:
        first = torch.cat([torch.full((1, places), token), ids], 1)
    found = {}
    for name in names:
        found[name] = first if name == names[0] else ids
    is_image = first == (-1 if token is None else token)
    kinds = {
        "mm_token_type_ids": is_image.int(),
        "token_type_ids": is_image.long(),
        "qformer_input_ids": ids,
    }
    if "image_embeds_position_mask" in takes:  # the first places are the picture's, whatever stands there
        count = getattr(config, "latent_query_num", 0)
        found[names[0]] = torch.cat([ids[:, :1].expand(1, count), ids], 1)
        kinds["image_embeds_position_mask"] = torch.arange(count + WORDS)[None] < count
    if names[0] == "input_ids":
        kinds["attention_mask"] = torch.ones_like(found["input_ids"])
    return found | {name: value for name, value in kinds.items() if name in takes}


def _places(model: Any, shown: Inputs) -> int:
    """The number of tokens that a picture or a sound takes."""
    method = "get_image_features"
    if "input_features" in shown:
        method = "get_audio_features"
    features = getattr(model, method, None) or getattr(getattr(model, "model", None), method, None)
    if features is None or not shown:
        return 0
    known = inspect.signature(features).parameters
    try:
        with torch.no_grad():
            out = features(**{name: value for name, value in shown.items() if name in known})
    except Exception:  # a guess, as above
        return 0
    found = getattr(out, "pooler_output", None)
    rows = pytree.tree_leaves(out if found is None else found)
    return sum(t.numel() // t.shape[-1] for t in rows if isinstance(t, Tensor))


# -- pictures -------------------------------------------------------------------------------------------------
def _pictures(model: Any, takes: set[str]) -> Iterator[Inputs]:
    config = model.config
    seeing = _part(config, "vision_config", "vit_config", "encoder")
    height, width = _sizes(_first(seeing, "image_size", "input_size") or SIDE)
    channels = _number(seeing, "num_channels", "in_channels", "in_chans", "input_channels") or 3
    patch = _sizes(_first(seeing, "patch_size"))[0]
    if "flattened_patches" in takes:
        yield _flat_patches(_number(seeing, "patch_embed_hidden_size") or channels * patch * patch)
    if "image_grid_thw" in takes and patch:
        side = 2 * (_number(seeing, "spatial_merge_size") or 1)
        deep = channels * patch * patch
        for frames in dict.fromkeys((_number(seeing, "temporal_patch_size") or 1, 1)):
            values = _random(side * side, deep * frames)
            yield {"pixel_values": values, "image_grid_thw": torch.tensor([[1, side, side]])}
    if "aspect_ratio_ids" in takes:
        tiles = _number(seeing, "max_num_tiles") or 1
        mask = (torch.arange(tiles) < 1).long()[None, None]
        values = _random(1, 1, tiles, channels, height, width)
        yield {"pixel_values": values, "aspect_ratio_ids": torch.ones(1, 1).long(), "aspect_ratio_mask": mask}
    if "pixel_values" in takes:
        yield {"pixel_values": _random(1, channels, height, width)}
        for pieces in PIECES:
            size = {}
            if "image_sizes" in takes:
                size = {"image_sizes": torch.tensor([[height, width]])}
            yield {"pixel_values": _random(1, pieces, channels, height, width), **size}


def _flat_patches(values: int) -> Inputs:
    """Every patch with its row and column in front."""
    places = torch.cartesian_prod(torch.arange(4), torch.arange(4)).float() + 1
    patches = torch.cat([places, _random(len(places), values)], 1)[None]
    return {"flattened_patches": patches, "attention_mask": torch.ones(1, len(places))}


# -- sounds ---------------------------------------------------------------------------------------------------
def _sounds(config: Any, takes: set[str]) -> Iterator[Inputs]:
    hearing = _part(config, "audio_config", "encoder_config", "encoder")
    if "input_features" in takes:
        bins = _number(
            hearing, "num_mel_bins", "input_feat_per_channel", "feature_projection_input_dim", "feature_size"
        )
        frames = 2 * (_number(hearing, "max_source_positions") or FRAMES // 2)
        mask = {"feature_attention_mask": torch.ones(1, frames).long()}
        also = mask if "feature_attention_mask" in takes else {}
        for shape in ((bins, frames), (min(frames, FRAMES), bins)) if bins else ():
            yield {"input_features": _random(1, *shape), **also}
    for name in ("input_values", "inputs"):
        if name in takes:
            bins = _number(hearing, "num_mel_bins")
            yield {name: _random(1, SAMPLES)}
            if bins:
                yield {name: _random(1, FRAMES, bins)}


# -- sizes that a config names ---------------------------------------------------------------------------------------
def _part(config: Any, *names: str) -> Any:
    """The config of a part of the model, or of the whole model if it has no such part."""
    found = (getattr(config, name, None) for name in names)
    return next((part for part in found if part is not None and not isinstance(part, (str, int))), config)


def _first(config: Any, *names: str) -> Any:
    about: Mapping[str, Any] = config if isinstance(config, dict) else config.to_dict()
    return next((about[name] for name in names if about.get(name)), None)


def _number(config: Any, *names: str) -> int:
    found = _first(config, *names)
    return found if isinstance(found, int) else 0


def _sizes(value: Any) -> tuple[int, int]:
    """Height and width; 0 where the config has none."""
    if isinstance(value, dict):
        value = [value.get("height", 0), value.get("width", 0)]
    if isinstance(value, (list, tuple)):
        return (int(value[0]), int(value[-1])) if value else (0, 0)
    if isinstance(value, int):
        return (int(value), int(value))
    return (0, 0)


def _random(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))
