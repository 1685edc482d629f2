"""`sparsebit config`: start a config file, check one, print the JSON schema for editors."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from sparsebit.cli import options
from sparsebit.cli.app import command
from sparsebit.cli.terminal.output import InputError, show, show_json
from sparsebit.cli.terminal.progress import start


@command("config init", "sparsebit config init --preset w4a8 --output qconfig.yaml")
def init(
    preset: Annotated[str, typer.Option("--preset", "-p", help="see: sparsebit list presets")] = "w8a8",
    output: Annotated[Path, typer.Option("--output", "-o", metavar="FILE", help="the file to write")] = Path(
        "qconfig.yaml"
    ),
    json: options.Json = False,
) -> None:
    """Write a config file to start from; it is a copy of a preset."""
    from sparsebit.quantization.presets import preset_path
    from sparsebit.utils.files import write_whole

    options.quant_config(None, preset, None)
    source = preset_path(preset)
    assert source is not None
    if output.exists():
        raise InputError(f"{output}: already exists; name another file with --output")
    write_whole(output, source.read_bytes())
    show(
        {"file": str(output), "preset": preset},
        f"wrote {output}; check it with: sparsebit config check {output}",
        json,
    )


@command("config check", "sparsebit config check qconfig.yaml")
def check(
    file: Annotated[str, typer.Argument(metavar="FILE", help="a YAML file", show_default=False)],
    json: options.Json = False,
) -> None:
    """Check a config file; every problem is a line that names the key and the fix."""
    found = _load(file)
    show({"ok": True, "config": found.to_dict()}, f"{file}: ok", json)


@command("config schema", "sparsebit config schema")
def schema(json: options.Json = False) -> None:
    """Print the JSON schema of config files, for editors that complete and check YAML."""
    from sparsebit.quantization.quant_config import json_schema

    show_json(json_schema())


def _load(file: str) -> Any:
    start()
    from sparsebit.config import read_yaml
    from sparsebit.quantization.quant_config import QuantConfig
    from sparsebit.sparse.sparse_config import SparseConfig

    keys = {str(key).upper() for key in read_yaml(file)}
    if "SPARSER" in keys:
        return SparseConfig.load(Path(file))
    return QuantConfig.load(Path(file))
