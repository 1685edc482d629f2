"""Where the results of one network lie: WORK/<network>/<tool>..."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Place:
    work: Path
    network: str

    @property
    def folder(self) -> Path:
        return self.work / "networks" / self.network.replace(" ", "_")

    @property
    def calibrate(self) -> Path:
        return self.folder / "calibrate.npz"

    @property
    def judge(self) -> Path:
        return self.folder / "judge.npz"

    @property
    def timed(self) -> Path:
        """One batch of one sample."""
        return self.folder / "timed.npz"

    @property
    def truth(self) -> Path:
        return self.folder / "truth.json"

    @property
    def prepared(self) -> bool:
        return self.timed.is_file() and self.file("float").is_file()

    def file(self, tool: str) -> Path:
        """ONNX; OpenVINO's own format where NNCF works on that."""
        return self.folder / f"{tool}.{'xml' if tool.startswith('openvino') else 'onnx'}"

    def made(self, tool: str) -> Path:
        """How the tool made its file, or why there is none."""
        return self.folder / f"{tool}.made.json"

    def outputs(self, tool: str, where: str) -> Path:
        return self.folder / f"{tool}.{where}.npz"

    def score(self, tool: str, where: str) -> Path:
        return self.folder / f"{tool}.{where}.json"

    def times(self, where: str) -> Path:
        return self.folder / f"times.{where}.json"

    def forget(self, tool: str) -> None:
        """Remove all that is known of the file of a tool, which is about to be made anew."""
        for file in [*self.folder.glob(f"{tool}.*")]:
            file.unlink()
        for file in self.folder.glob("times.*.json"):
            write(file, {name: row for name, row in read(file).items() if name != tool})

    def tools(self) -> list[str]:
        """Every tool that has been asked for a file here."""
        return sorted(file.name.removesuffix(".made.json") for file in self.folder.glob("*.made.json"))


def read(file: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(file.read_text("utf-8")) if file.is_file() else {}
    return found


def write(file: Path, content: Any) -> None:
    file.write_text(json.dumps(content, indent=1) + "\n", "utf-8")
