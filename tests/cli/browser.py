"""Chromium without a screen and without a network."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
OPTIONS = [
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--hide-scrollbars"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
    "--host-resolver-rules=MAP * ~NOTFOUND",
]


def dom(file: Path, folder: Path, size: tuple[int, int]) -> str:
    """The document after its scripts have run."""
    return _run(file, folder, size, "--dump-dom")


def screenshot(file: Path, image: Path, folder: Path, size: tuple[int, int], dark: bool = False) -> None:
    scheme = ["--blink-settings=preferredColorScheme=0"] if dark else []
    _run(file, folder, size, f"--screenshot={image}", *scheme)


def _run(file: Path, folder: Path, size: tuple[int, int], *more: str) -> str:
    assert CHROMIUM is not None
    window = f"--window-size={size[0]},{size[1]}"
    profile = f"--user-data-dir={folder / 'chromium'}"
    command = [CHROMIUM, *OPTIONS, profile, window, *more, f"file://{file}"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout
