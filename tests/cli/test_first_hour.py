"""The first hour of a new user: install the wheel into a clean venv, and use the real command in a pseudo-terminal.

Nothing is downloaded; screenshots go to SPARSEBIT_SCREENSHOTS, or into the test's own folder.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import threading
import venv
import zipfile
from pathlib import Path

import pytest
from browser import CHROMIUM, dom, screenshot
from cli_files import fill
from llm_files import tiny_llama

pty = pytest.importorskip("pty")
pytestmark = pytest.mark.slow
ROOT = Path(__file__).resolve().parents[2]
ASSETS = Path(os.environ.get("SPARSEBIT_ASSETS", ROOT.parent / "shared" / "assets"))
ESCAPES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]|\r")


class Terminal:
    """Types a command line; what comes back is what a person sees, without colours."""

    def __init__(self, folder: Path, venv: Path):
        self.folder, self.venv, self.python = folder, venv, venv / "bin/python"

    def type(self, line: str, timeout: int = 150) -> tuple[int, str]:
        master, slave = pty.openpty()
        env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        env |= {"TERM": "xterm", "COLUMNS": "200", "LINES": "50", "VIRTUAL_ENV": str(self.venv)}
        env["OMP_NUM_THREADS"] = "1"  # two threads beside a busy core are slower than one
        env["PATH"] = os.pathsep.join([str(self.venv / "bin"), os.environ["PATH"]])
        process = subprocess.Popen(
            line,
            shell=True,
            stdin=slave,
            stdout=slave,
            stderr=slave,
            cwd=self.folder,
            env=env,
            close_fds=True,
        )
        os.close(slave)
        shown = bytearray()
        reader = threading.Thread(target=_collect, args=(master, shown), daemon=True)
        reader.start()
        code = process.wait(timeout)
        reader.join(10)
        os.close(master)
        return code, ESCAPES.sub("", shown.decode(errors="replace"))

    def good(self, line: str) -> str:
        code, shown = self.type(line)
        assert code == 0, f"{line}\n{shown}"
        return shown


def _collect(master: int, shown: bytearray) -> None:
    while True:
        try:
            part = os.read(master, 65536)
        except OSError:  # nobody writes any more
            return
        if not part:
            return
        shown.extend(part)


# The wheel of torchvision in the test environment does not load beside a CPU torch: here it is not installed.
NO_TORCHVISION = "import sys\nsys.modules['torchvision'] = None\n"


@pytest.fixture(scope="module")
def terminal(tmp_path_factory) -> Terminal:
    """A venv with the wheel, installed by pip. Its dependencies are those of the test environment: no network."""
    installed = {d.name for d in importlib.metadata.distributions()}
    for package in sorted(
        {"hatchling", "pip"} - installed
    ):  # find_spec("pip") would disable setuptools' distutils
        pytest.skip(f"building and installing the wheel needs {package}")
    folder = tmp_path_factory.mktemp("hour")
    build = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder / "dist")]
    subprocess.run(build, cwd=ROOT, check=True, capture_output=True)
    (wheel,) = (folder / "dist").glob("sparsebit-*.whl")
    venv.create(folder / "venv", symlinks=True)
    shell = Terminal(folder / "work", folder / "venv")
    pip = [
        sys.executable,
        "-m",
        "pip",
        "--python",
        str(shell.python),
        "install",
        "--disable-pip-version-check",
    ]
    subprocess.run([*pip, "--no-deps", "--no-index", str(wheel)], check=True, capture_output=True)
    (site,) = (folder / "venv/lib").glob("python*/site-packages")
    (site / "dependencies.pth").write_text(f"{sysconfig.get_path('purelib')}\n")
    (site / "sitecustomize.py").write_text(NO_TORCHVISION)
    shell.folder.mkdir()
    return shell


def test_the_wheel_is_what_runs(terminal):
    code = "import sparsebit; print(sparsebit.__file__)"
    file = Path(terminal.good(f"python -c '{code}'").strip())
    assert file.is_relative_to(terminal.venv) and file.with_name("py.typed").exists()
    assert Path(terminal.good("which sparsebit").strip()) == terminal.venv / "bin/sparsebit"
    shown = terminal.good("sparsebit --help")
    assert "quantize" in shown and "llm" in shown
    version = terminal.good("sparsebit --version")
    assert version == terminal.good("python -m sparsebit --version") and version.strip()


def test_demo(terminal):
    pytest.importorskip("sklearn")
    shown = terminal.good("sparsebit demo")
    assert "float32" in shown and "W8A8" in shown and "pruned" in shown
    assert shown.rstrip().splitlines()[-1].split()[:2] == ["sparsebit", "quantize"]  # what to do next


# -- a model of one's own ----------------------------------------------------------------------------------
def need(*packages: str) -> None:
    for package in packages:
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"needs {package}")


def test_a_small_model(terminal, tmp_path):
    """The same hour where there are no assets."""
    need("onnxruntime", "onnxscript")
    fill(terminal.folder)
    assert "4 quantized" in terminal.good("sparsebit check net.py:build --input-shape 4,3,8,8")
    first_hour(terminal, "net.py:build --data x.npy --batch-size 4", "runs/small")
    look_at(terminal.folder / "runs/small/report.html", tmp_path, "small", layer="_7")


def first_hour(terminal: Terminal, words: str, run: str) -> None:
    shown = terminal.good(f"sparsebit quantize {words} -o {run}")
    assert re.search(r"^certificate +holds", shown, re.M) and re.search(r"^latency +\d", shown, re.M)
    assert "calibrating" in shown  # there was a bar
    shown = terminal.good(f"sparsebit verify {run}/model.onnx")
    assert re.search(r"^certificate +holds", shown, re.M)
    assert f"wrote {run}/report.html" in terminal.good(f"sparsebit report {run}")


def test_a_language_model(terminal, tmp_path):
    """A LLaMA with random weights, two blocks: quantized, measured, asked, and its report opened."""
    need("transformers", "accelerate", "compressed_tensors")
    tiny_llama(terminal.folder)
    words = "model --data text.txt --bits 4 --group-size 32 --length 32 --samples 8"
    shown = terminal.good(f"sparsebit llm quantize {words} -o runs/w4")
    assert re.search(r"^perplexity +[\d.]+", shown, re.M)
    assert "perplexity" in terminal.good("sparsebit llm eval runs/w4 --data text.txt --length 32")
    shown = terminal.good("sparsebit llm chat runs/w4 --prompt 'the cat' --max-tokens 5")
    assert "the cat" in shown
    assert "wrote runs/w4/report.html" in terminal.good("sparsebit report runs/w4")
    code, shown = terminal.type("sparsebit llm quantize modle --data text.txt -o runs/none")
    assert code == 2 and "modle" in shown.strip().splitlines()[-1]
    if CHROMIUM is None:
        pytest.skip("the rest needs chromium (Debian: apt-get install chromium)")
    text = dom(terminal.folder / "runs/w4/report.html", tmp_path, (1200, 2600))
    assert "Perplexity" in text and "model.layers.1.mlp.down_proj" in text


@pytest.fixture(scope="module")
def mobilenet(terminal) -> str:
    """The words that name the model: the architecture in a file, its weights in another."""
    need("onnxruntime", "onnxscript", "PIL")
    if not (ASSETS / "mobilenet_v2").is_dir():
        pytest.skip(f"no assets at {ASSETS}; set SPARSEBIT_ASSETS to the folder with real weights")
    (weights,) = (ASSETS / "mobilenet_v2").glob("*.pth")
    with zipfile.ZipFile(ASSETS / "imagenet1k_256.zip") as archive:
        names = sorted(n for n in archive.namelist() if n.lower().endswith((".jpeg", ".jpg")))
        for name in names[::63]:
            file = terminal.folder / "images" / Path(name).name
            file.parent.mkdir(exist_ok=True)
            file.write_bytes(archive.read(name))
    shutil.copy(ROOT / "benchmarks/assets.py", terminal.folder / "mobilenet.py")
    shutil.copy(weights, terminal.folder)
    return f"mobilenet.py:MobileNetV2 --weights {weights.name} --input-shape 4,3,224,224"


def test_mobilenet(terminal, mobilenet, tmp_path):
    shown = terminal.good(f"sparsebit check {mobilenet}")
    assert "63 quantized" in shown and "96.4 % in integers" in shown
    first_hour(terminal, f"{mobilenet} --data images --batch-size 4", "runs/w8a8")
    look_at(terminal.folder / "runs/w8a8/report.html", tmp_path, "mobilenet", layer="features_17_conv_2")


def look_at(report: Path, folder: Path, name: str, layer: str) -> None:
    if CHROMIUM is None:
        pytest.skip("the rest needs chromium (Debian: apt-get install chromium)")
    text = dom(report, folder, (1200, 2600))
    assert layer in text and "in onnxruntime" in text and text.count("<button") >= 11
    shots = Path(os.environ.get("SPARSEBIT_SCREENSHOTS", folder))
    shots.mkdir(parents=True, exist_ok=True)
    for form, size, dark in (
        ("desk", (1200, 2600), False),
        ("dark", (1200, 2600), True),
        ("phone", (390, 2600), False),
    ):
        screenshot(report, shots / f"{name}-{form}.png", folder, size, dark)
        assert (shots / f"{name}-{form}.png").stat().st_size > 50_000  # not an empty page


# -- ten mistakes ----------------------------------------------------------------------------------------
MISTAKES = {
    "a key": (
        "QUANTIZER: {TYPE: uniform, BIT: 8}",
        "QUANTISER: {TYPE: uniform}",
        "W.QUANTISER",
        "QUANTIZER?",
    ),
    "an option": ("BIT: 8", "BITS: 8", "W.QUANTIZER.BITS", "did you mean BIT?"),
    "a word for a number": ("BIT: 8", "BIT: eight", "W.QUANTIZER.BIT", "expected an integer"),
    "too wide": ("BIT: 8", "BIT: 80", "W.QUANTIZER.BIT", "less than or equal to 16"),
    "an observer": ("TYPE: mean_minmax", "TYPE: mean_minmx", "A.OBSERVER.TYPE", "did you mean mean_minmax?"),
    "a scheme": ("per-tensor-affine", "per-tensor", "A.QSCHEME", "per-tensor-affine"),
    "a backend": ("BACKEND: onnxruntime", "BACKEND: onnx_runtime", "BACKEND", "did you mean onnxruntime?"),
    "a switch": ("FUSE_BN: true", "FUSE_BN: often", "SCHEDULE.FUSE_BN", "true or false"),
    "a section": ("SCHEDULE:", "SCHEDUEL:", "SCHEDUEL", "did you mean SCHEDULE?"),
    "a bracket": ("BIAS_CORRECTION: true}", "BIAS_CORRECTION: true", "qconfig.yaml: line", "YAML"),
}


def test_ten_mistakes_get_ten_answers(terminal):
    """Each is one line that names the key and the fix."""
    terminal.good("sparsebit config init --preset w8a8 --output qconfig.yaml")
    assert "qconfig.yaml: ok" in terminal.good("sparsebit config check qconfig.yaml")
    file = terminal.folder / "qconfig.yaml"
    right = file.read_text()
    assert len(MISTAKES) == 10
    for what, (old, new, key, fix) in MISTAKES.items():
        assert old in right, what
        file.write_text(right.replace(old, new, 1))
        code, shown = terminal.type("sparsebit config check qconfig.yaml")
        shown = re.sub(r"^.* starting .*$", "", shown, flags=re.M)  # a bar, wiped when torch is loaded
        lines = [line for line in shown.splitlines() if line.strip()]
        assert code == 2 and len(lines) == 1 and lines[0].startswith("error: "), (what, shown)
        assert key in lines[0] and fix in lines[0], (what, lines[0])
