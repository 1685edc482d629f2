"""A checkpoint that grows block by block. A file is complete or absent, so a killed run can be resumed.

One safetensors file per block, one for the rest, an index, config.json, and run.json, which names the settings of the
run: a folder never mixes two runs.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

from torch import Tensor

from sparsebit.errors import ConfigError
from sparsebit.utils.files import write_whole

RUN = "run.json"
INDEX = "model.safetensors.index.json"
REST = "model-rest.safetensors"
BESIDE = (
    "tokenizer*",
    "vocab*",
    "merges.txt",
    "special_tokens_map.json",
    "generation_config.json",
    "chat_template*",
    "added_tokens.json",
    "preprocessor_config.json",
    "*processor_config.json",
    "normalizer.json",
    "*.spm",
    "spiece.model",
)


class Store:
    """The folder of one run."""

    def __init__(self, folder: str | Path, run: dict[str, Any]) -> None:
        run = json.loads(json.dumps(run, default=str))  # as it will be read again
        self.folder = Path(folder)
        self.folder.mkdir(parents=True, exist_ok=True)
        path = self.folder / RUN
        if path.is_file():
            known = json.loads(path.read_text())
            if known["run"] != run:
                differ = sorted(k for k in {*run, *known["run"]} if run.get(k) != known["run"].get(k))
                raise ConfigError(
                    f"save: {self.folder} holds another run (other {', '.join(differ)}); "
                    "choose another folder, or delete this one to start again"
                )
            self.state: dict[str, Any] = known
        else:
            if list(self.folder.glob("*.safetensors")):
                raise ConfigError(f"save: {self.folder} holds a checkpoint already; choose an empty folder")
            self.state = {"run": run, "layers": {}}
            self._note()

    def has(self, block: int) -> bool:
        return self._path(block).is_file()

    def read(self, block: int) -> dict[str, Tensor]:
        from safetensors.torch import load_file

        return load_file(self._path(block))

    def names(self, block: int) -> list[str]:
        """The names of the stored tensors of a block."""
        from safetensors import safe_open

        with safe_open(str(self._path(block)), framework="pt") as file:
            return list(file.keys())

    def write(self, block: int, tensors: dict[str, Tensor], layers: dict[str, Any]) -> None:
        self.note("layers", {**self.state["layers"], **layers})
        self._save(self._path(block), tensors)

    def note(self, key: str, value: Any) -> None:
        """Something about this run that a resumed one should know."""
        self.state[key] = value
        self._note()

    def finish(
        self, blocks: int, rest: dict[str, Tensor], config: dict[str, Any], source: Path | None
    ) -> None:
        """Everything else; config.json comes last, so that a folder with one is complete."""
        from safetensors import safe_open

        self._save(self.folder / REST, rest)
        where = {}
        for path in [*(self._path(i) for i in range(blocks)), self.folder / REST]:
            with safe_open(str(path), framework="pt") as file:
                where.update(dict.fromkeys(file.keys(), path.name))
        size = sum((self.folder / name).stat().st_size for name in set(where.values()))
        self._json(INDEX, {"metadata": {"total_size": size}, "weight_map": where})
        for pattern in BESIDE if source is not None else ():
            for path in sorted(source.glob(pattern) if source is not None else ()):
                shutil.copy(path, self.folder / path.name)
        self._json("config.json", config)

    def _path(self, block: int) -> Path:
        return self.folder / f"model-block-{block:05d}.safetensors"

    def _save(self, path: Path, tensors: dict[str, Tensor]) -> None:
        from safetensors.torch import save

        write_whole(path, save({k: v.contiguous().cpu() for k, v in tensors.items()}, {"format": "pt"}))

    def _note(self) -> None:
        self._json(RUN, self.state)

    def _json(self, name: str, content: Any) -> None:
        write_whole(self.folder / name, (json.dumps(content, indent=1) + "\n").encode())
