"""Ready-made configs: ordinary YAML files of this folder. The first line of each describes its purpose."""

from __future__ import annotations

from pathlib import Path

_FOLDER = Path(__file__).parent


def presets() -> dict[str, str]:
    """Name -> purpose."""
    files = sorted(_FOLDER.glob("*.yaml"), key=lambda path: path.stem)
    return {path.stem: _first_line(path) for path in files}


def preset_path(name: str) -> Path | None:
    """The file of a preset, or None if there is no preset of that name."""
    path = _FOLDER / f"{name}.yaml"
    return path if name in presets() else None


def _first_line(path: Path) -> str:
    with path.open(encoding="utf-8") as file:
        return file.readline().lstrip("#").strip()
