"""Options that several commands share, with their help."""

from __future__ import annotations

from enum import Enum
from pathlib import Path
from typing import Annotated, Any

import typer

from sparsebit.cli.terminal.output import InputError
from sparsebit.cli.terminal.progress import start


class FrontEnd(str, Enum):
    """How the graph of a model is found."""

    auto = "auto"
    fx = "fx"
    export = "export"


Model = Annotated[
    str,
    typer.Argument(
        metavar="MODEL",
        help="file.py:factory, package.module:factory, timm:name, torchvision:name, hf:DIR or a .pt2 file",
        show_default=False,
    ),
]
Run = Annotated[Path, typer.Argument(metavar="RUN", help="the folder of a run", show_default=False)]
Weights = Annotated[
    str | None,
    typer.Option(metavar="FILE", help="safetensors, or a state_dict of torch.save; no code in it is run"),
]
Data = Annotated[
    str | None,
    typer.Option(metavar="DATA", help="a folder of images, .npz, .npy, .txt (for hf:DIR), or file.py:loader"),
]
InputShape = Annotated[
    str | None,
    typer.Option(
        "--input-shape",
        "--example-shape",
        metavar="SIZES",
        help="1,3,224,224: the size of images, or of a random input",
    ),
]
BatchSize = Annotated[int, typer.Option(help="samples per batch")]
Samples = Annotated[int, typer.Option(help="at most so many samples of the data are used")]
Config = Annotated[str | None, typer.Option("--config", "-c", metavar="FILE", help="a YAML file")]
Preset = Annotated[
    str | None, typer.Option("--preset", "-p", metavar="NAME", help="see: sparsebit list presets")
]
Changes = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="change one option, as in A.OBSERVER.TYPE=mse"),
]
Output = Annotated[
    Path, typer.Option("--output", "-o", metavar="DIR", help="a new folder for the run", show_default=False)
]
Resume = Annotated[bool, typer.Option("--resume", help="resume an interrupted run: skip finished steps")]
Export = Annotated[bool, typer.Option("--export/--no-export", help="write and check an ONNX file")]
FixedBatch = Annotated[
    bool, typer.Option("--fixed-batch", help="the ONNX file takes only batches of --batch-size")
]
Tune = Annotated[
    bool,
    typer.Option(
        "--tune", help="measure here; layers that integers make slower stay float, also in the model"
    ),
]
Trace = Annotated[
    FrontEnd,
    typer.Option(
        help="auto: torch.fx, and torch.export where that makes more of the model integer; fx, export: only that one"
    ),
]
Metric = Annotated[
    str | None,
    typer.Option(
        metavar="FILE.py:FUNCTION",
        help="function(model, batches) -> number, for the report; labels in the data give top-1 without it",
    ),
]
Json = Annotated[bool, typer.Option("--json", help="print JSON")]


def quant_config(config: str | None, preset: str | None, changes: list[str] | None) -> Any:
    """The QuantConfig of --config or --preset, with --set on top."""
    start()
    from sparsebit.config import did_you_mean
    from sparsebit.quantization.presets import presets
    from sparsebit.quantization.quant_config import QuantConfig

    if config and preset:
        raise InputError("--config and --preset: give one of them, and --set for changes")
    if preset and preset not in presets():
        raise InputError(
            f"--preset {preset}: no such preset{did_you_mean(preset, presets())} ({', '.join(presets())})"
        )
    if config and Path(config).is_dir():
        raise InputError(f"--config {config}: is a folder")
    loaded = QuantConfig.load(config or preset)
    return loaded.override(*_pairs(changes or []))


def _pairs(changes: list[str]) -> list[Any]:
    import yaml

    found: list[Any] = []
    for change in changes:
        key, equals, value = change.partition("=")
        if not key or not equals:
            raise InputError(f"--set {change}: expected KEY=VALUE, such as A.OBSERVER.TYPE=mse")
        try:
            found += [key, yaml.safe_load(value)]
        except yaml.YAMLError:
            raise InputError(f"--set {change}: {value!r} is not a YAML value") from None
    return found
