"""--data: an image folder, .npz, .npy, a text file or file.py:loader, as a list of batches."""

from __future__ import annotations

import logging
import zipfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from sparsebit.cli.inputs.models import optional
from sparsebit.cli.inputs.objects import call, find_object
from sparsebit.cli.terminal.output import InputError, one_line

FORMS = "a folder of images, .npz, .npy, .txt, or file.py:loader"
IMAGES = {".jpg", ".jpeg", ".png", ".bmp", ".webp", ".gif", ".tif", ".tiff"}
PICKLES = {".pkl", ".pickle", ".pt", ".pth"}
MEAN = (0.485, 0.456, 0.406)  # of ImageNet
STD = (0.229, 0.224, 0.225)
MOST_TOKENS = 128
PIXELS = 30.0  # normalised images stay far below
FEW = 8  # samples
log = logging.getLogger("sparsebit")


def load_batches(
    spec: str, model: Any, shape: tuple[int, ...] | None, batch_size: int, samples: int, model_spec: str = ""
) -> list[Any]:
    """At most `samples` samples, all finite, none of an unexpected shape."""
    path = Path(spec)
    if path.is_dir():
        batches = _images(path, shape, batch_size, samples)
    elif ":" in spec and not path.exists():
        batches = _of_loader(spec, samples)
    elif not path.is_file():
        raise InputError(f"{spec}: no such file or folder; --data takes {FORMS}")
    elif path.suffix in (".npy", ".npz"):
        batches = _arrays(path, model, shape, batch_size, samples)
    elif path.suffix == ".txt":
        batches = _text(path, model_spec, batch_size, samples)
    elif path.suffix in PICKLES:
        raise InputError(
            f"{spec}: pickles can run code, so they are refused; save an .npy or .npz, or {FORMS}"
        )
    else:
        raise InputError(f"{spec}: is not a known form of data; --data takes {FORMS}")
    if not batches:
        raise InputError(f"{spec}: has no samples; a few dozen are enough")
    _refuse_non_finite(spec, batches)
    _doubt_pixels(spec, batches[0])
    return batches


def parse_shape(text: str) -> tuple[int, ...]:
    """`1,3,224,224`."""
    try:
        shape = tuple(int(part) for part in text.replace("x", ",").split(","))
    except ValueError:
        shape = ()
    if not shape or min(shape) < 1:
        raise InputError(f"--input-shape: expected sizes such as 1,3,224,224, got {text!r}")
    return shape


def random_batch(shape: tuple[int, ...]) -> Any:
    """For what needs no real data: the same numbers every time."""
    import torch

    return torch.randn(shape, generator=torch.Generator().manual_seed(0))


def absolute(spec: str) -> str:
    """The name of the data with an absolute path."""
    where, _, name = spec.rpartition(":")
    if where.endswith(".py"):
        return f"{Path(where).resolve()}:{name}"
    if Path(spec).exists():
        return str(Path(spec).resolve())
    return spec


# -- arrays ----------------------------------------------------------------------------------------------
def _arrays(
    path: Path, model: Any, shape: tuple[int, ...] | None, batch_size: int, samples: int
) -> list[Any]:
    import numpy as np

    try:
        found = np.load(path, mmap_mode="r" if path.suffix == ".npy" else None, allow_pickle=False)
        if isinstance(found, np.ndarray):
            arrays = {"": found}
        else:
            arrays = {k: found[k] for k in found.files}
    except ValueError as error:
        if _is_pickled(error):
            why = "objects are pickled in it"
        else:
            why = one_line(error)
        raise InputError(f"{path}: cannot be read: {why}; save arrays of numbers") from None
    except (OSError, EOFError, zipfile.BadZipFile, KeyError) as error:
        raise InputError(f"{path}: is broken: {one_line(error)}") from None
    if not all(a.ndim for a in arrays.values()):
        raise InputError(f"{path}: holds a single number; the first axis is that of the samples")
    lengths = {len(a) for a in arrays.values()}
    if len(lengths) > 1:
        raise InputError(f"{path}: arrays of different lengths: {', '.join(map(str, sorted(lengths)))}")
    if shape is not None and len(arrays) == 1:
        (array,) = arrays.values()
        if array.shape[1:] != shape[1:]:
            raise InputError(
                f"{path}: its samples have the shape {_text_shape(array.shape[1:])}, "
                f"--input-shape asks for {_text_shape(shape[1:])}"
            )
    tensors = {name: _tensor(path, name, a[:samples], model) for name, a in arrays.items()}
    split = {}
    for name, t in tensors.items():
        split[name] = t.split(batch_size) if len(t) else ()
    names = _argument_names(path, model, list(split))
    if names:
        return [dict(zip(names, parts)) for parts in zip(*split.values())]
    result: list[Any] = []
    for parts in zip(*split.values()):
        result.append(parts[0] if len(parts) == 1 else parts)
    return result


def _is_pickled(error: ValueError) -> bool:
    return "allow_pickle" in str(error) or "Python objects" in str(error)


def _argument_names(path: Path, model: Any, names: list[str]) -> list[str]:
    """Arrays that are called like the arguments of the forward are given by name, others in their order."""
    import inspect

    known = []
    if hasattr(model, "forward"):
        known = list(inspect.signature(model.forward).parameters)
    fitting = [name for name in names if name in known]
    if fitting == names:
        return names
    if names[: len(fitting)] != known[: len(fitting)]:  # else: labels behind the inputs, as in (x, y)
        strange = ", ".join(name for name in names if name not in known)
        raise InputError(f"{path}: {strange} is not an argument of the model; it takes {', '.join(known)}")
    return []


def _tensor(path: Path, name: str, array: Any, model: Any) -> Any:
    import numpy as np
    import torch

    if array.dtype.kind not in "fiub":
        where = f"{path}{f': {name}' if name else ''}"
        raise InputError(f"{where}: holds {array.dtype}, not numbers")
    tensor = torch.from_numpy(np.array(array))  # a copy: the file may be mapped
    if tensor.is_floating_point():
        floats = (p.dtype for p in model.parameters() if p.is_floating_point())
        return tensor.to(next(floats, torch.float32))
    if tensor.dtype is torch.bool:
        return tensor
    return tensor.long()


def _text_shape(shape: tuple[int, ...]) -> str:
    return "x".join(map(str, shape)) or "()"


# -- images ----------------------------------------------------------------------------------------------
def _images(folder: Path, shape: tuple[int, ...] | None, batch_size: int, samples: int) -> list[Any]:
    """Resized, cropped in the middle and normalised as for ImageNet; evenly spaced, so that all classes come."""
    import torch

    optional("PIL", f"{folder}: a folder of images")
    if shape is not None and len(shape) == 4 and shape[1] not in (1, 3):
        raise InputError(
            f"{folder}: an image has 1 or 3 channels, --input-shape asks for {shape[1]}; give such inputs as .npy"
        )
    if shape is None or len(shape) != 4:
        raise InputError(f"{folder}: images of which size? add --input-shape 1,3,224,224")
    files = sorted(f for f in folder.rglob("*") if f.suffix.lower() in IMAGES)
    step = max(len(files) / samples, 1)
    chosen = [files[int(i * step)] for i in range(min(samples, len(files)))]
    if not chosen:
        raise InputError(f"{folder}: no images in it ({', '.join(sorted(IMAGES))})")
    return list(torch.stack([_image(file, shape) for file in chosen]).split(batch_size))


def _image(path: Path, shape: tuple[int, ...]) -> Any:
    import numpy as np
    import torch
    from PIL import Image, UnidentifiedImageError

    _, channels, height, width = shape
    try:
        with Image.open(path) as opened:
            image = opened.convert("RGB" if channels == 3 else "L")
    except (UnidentifiedImageError, OSError, SyntaxError) as error:
        raise InputError(f"{path}: is not an image that can be read: {one_line(error)}") from None
    scale = max(height / image.height, width / image.width) / 0.875
    size = (max(round(image.width * scale), width), max(round(image.height * scale), height))
    image = image.resize(size, Image.Resampling.BILINEAR)
    left = (size[0] - width) // 2
    top = (size[1] - height) // 2
    pixels = np.asarray(image.crop((left, top, left + width, top + height)), dtype=np.float32) / 255
    x = torch.from_numpy(pixels.copy()).reshape(height, width, channels).permute(2, 0, 1)
    return (x - torch.tensor(MEAN[:channels])[:, None, None]) / torch.tensor(STD[:channels])[:, None, None]


# -- text, loaders ---------------------------------------------------------------------------------------
def _text(path: Path, model_spec: str, batch_size: int, samples: int) -> list[Any]:
    """One sample per line, by the tokenizer of the model's own folder."""
    if not model_spec.startswith("hf:"):
        raise InputError(f"{path}: text needs a tokenizer: a model hf:DIR, or tokens by file.py:loader")
    tokenizers = optional("transformers", str(path)).AutoTokenizer

    try:
        lines = [line for line in path.read_text("utf-8").splitlines() if line.strip()][:samples]
    except UnicodeDecodeError:
        raise InputError(f"{path}: not a text file in UTF-8") from None
    folder = model_spec.removeprefix("hf:")
    tokenizer = call(model_spec, lambda: tokenizers.from_pretrained(folder, local_files_only=True))
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    options = {"padding": "max_length", "truncation": True, "max_length": MOST_TOKENS, "return_tensors": "pt"}
    groups = [lines[i : i + batch_size] for i in range(0, len(lines), batch_size)]
    return [dict(call(str(path), lambda g=group: tokenizer(g, **options))) for group in groups]


def _of_loader(spec: str, samples: int) -> list[Any]:
    from torch import Tensor

    found = find_object(spec)
    if callable(found) and not hasattr(found, "__iter__"):
        batches = call(spec, found)
    else:
        batches = found
    if isinstance(batches, (Tensor, Mapping)):
        return [batches]
    if not isinstance(batches, Iterable):
        raise InputError(f"{spec}: gave a {type(batches).__name__}; it must give batches, or yield them")
    taken: list[Any] = []
    count = 0

    def take() -> None:
        nonlocal count
        for batch in batches:
            taken.append(batch)
            count += length(batch)
            if count >= samples:
                return

    call(spec, take)
    return taken


def length(batch: Any) -> int:
    """Samples in a batch: the first size of its first tensor."""
    from torch import Tensor
    from torch.utils import _pytree as pytree

    first = next((leaf for leaf in pytree.tree_leaves(batch) if isinstance(leaf, Tensor)), None)
    return len(first) if first is not None and first.dim() else 1


def _refuse_non_finite(spec: str, batches: list[Any]) -> None:
    import torch
    from torch.utils import _pytree as pytree

    for i, batch in enumerate(batches):
        for leaf in pytree.tree_leaves(batch):
            if isinstance(leaf, torch.Tensor) and leaf.is_floating_point() and not leaf.isfinite().all():
                raise InputError(f"{spec}: batch {i} has values that are NaN or infinite")


def _doubt_pixels(spec: str, batch: Any) -> None:
    """Images from 0 to 255 are rarely what a model was trained on."""
    import torch
    from torch.utils import _pytree as pytree

    for leaf in pytree.tree_leaves(batch):
        if isinstance(leaf, torch.Tensor) and leaf.dim() == 4 and leaf.is_floating_point() and leaf.numel():
            low = float(leaf.min())
            high = float(leaf.max())
            if low >= 0 and high > PIXELS:
                log.warning(
                    "%s: values from %.3g to %.3g look like pixels that are not normalised; give the inputs as in "
                    "training, mostly (x / 255 - mean) / std",
                    spec,
                    low,
                    high,
                )
                return


def doubt_samples(spec: str, batches: list[Any]) -> None:
    """Ranges of activations from a handful of samples do not hold for others."""
    count = sum(map(length, batches))
    if count < FEW:
        what = "sample" if count == 1 else "samples"
        log.warning(
            "%s: has %d %s; ranges of activations need a few dozen, 128 are a good start", spec, count, what
        )
