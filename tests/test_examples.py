"""The examples run, and show what they say they show; in settings that take seconds."""

from __future__ import annotations

import json
import runpy
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

EXAMPLES = Path(__file__).resolve().parent.parent / "examples"
PTQ, QAT = "post_training_quantization", "quantization_aware_training"


@pytest.fixture
def example(tmp_path, monkeypatch):
    """Loads an example; on one thread, because tiny layers on a busy machine are ten times slower on two."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    threads, known = torch.get_num_threads(), set(sys.modules)
    torch.set_num_threads(1)
    yield lambda name: runpy.run_path(str(EXAMPLES / name))
    torch.set_num_threads(threads)
    for name in set(sys.modules) - known:  # `model` and `dataset` mean something else in the next folder
        if str(EXAMPLES) in (getattr(sys.modules[name], "__file__", None) or ""):
            del sys.modules[name]


# -- quantization after training -------------------------------------------------------------------------
def test_ptq_cifar10(example, capsys):
    script = example(f"{PTQ}/cifar10/basecase/main.py")
    results = script["main"](["--samples", "200", "--epochs", "2", "--onnx", "resnet.onnx"])
    assert results["quantized dB"] > 20 and abs(results["float %"] - results["quantized %"]) < 5
    printed = capsys.readouterr().out
    assert "integers" in printed and "certificate      holds" in printed  # the pre-flight; the exported file


def test_ptq_imagenet(example):
    script = example(f"{PTQ}/imagenet1k/basecase/main.py")
    results = script["main"](["--samples", "200", "--epochs", "1", "--observers", "minmax", "mse"])
    assert results["minmax dB"] > 20 and results["mse dB"] > 20


def test_ptq_deit(example, capsys):
    results = example(f"{PTQ}/imagenet1k/deit/main.py")["main"](["--samples", "96", "--epochs", "1"])
    assert results["quantized dB"] > 20
    assert "blocks.0.attn.qkv" in capsys.readouterr().out  # the profile


def test_ptq_yolo(example):
    script = example(f"{PTQ}/coco2017/yolo_series/main.py")
    results = script["main"](["--samples", "160", "--epochs", "3"])
    assert results["head 0 dB"] > 15 and results["head 1 dB"] > 15
    assert abs(results["float mAP50 %"] - results["quantized mAP50 %"]) < 10 < results["float mAP50 %"]


def test_ptq_bert(example):
    results = example(f"{PTQ}/GLUE/CoLA/main.py")["main"](["--samples", "300", "--epochs", "2"])
    assert results["quantized dB"] > 20 and abs(results["float %"] - results["quantized %"]) < 5


def test_ptq_gpt2(example):
    results = example(f"{PTQ}/wikitext/main.py")["main"](["--samples", "200", "--epochs", "2"])
    assert results["float perplexity"] < 20  # of 39 words
    assert results["quantized perplexity"] < 1.02 * results["float perplexity"]


# -- training with quantization --------------------------------------------------------------------------
@pytest.mark.parametrize("config", ["qconfig.yaml", "qconfig_pact.yaml"])
def test_qat_cifar10(example, config):
    script = example(f"{QAT}/cifar10/basecase/main.py")
    quick = ["--samples", "200", "--epochs", "2", "--more-epochs", "2"]
    results = script["main"]([str(Path(script["__file__"]).with_name(config)), *quick])
    assert results["trained"] > results["calibrated"] + 5


def test_qat_imagenet(example):
    quick = ["--samples", "200", "--epochs", "3", "--more-epochs", "2"]
    results = example(f"{QAT}/imagenet1k/basecase/main.py")["main"](quick)
    least = 30 if torch.backends.cpu.get_cpu_capability() == "AVX512" else 20  # 28 with AVX2; chance: 10
    assert results["trained"] >= results["calibrated"] and results["trained"] > least


def test_qat_deit(example):
    quick = ["--samples", "128", "--epochs", "2", "--more-epochs", "1"]
    results = example(f"{QAT}/imagenet1k/deit/main.py")["main"](quick)
    assert results["trained"] > 15  # chance: 10


def test_qat_bev(example):
    quick = ["--samples", "160", "--epochs", "8", "--more-epochs", "3"]
    results = example(f"{QAT}/nuscenes/bevdet/main.py")["main"](quick)
    assert results["trained"] > results["calibrated"] and results["trained"] > results["float"] - 10 > 40


# -- pruning ---------------------------------------------------------------------------------------------
def test_structured_prune(example):
    quick = ["--samples", "200", "--epochs", "2", "--more-epochs", "2"]
    results = example("structured_prune/cifar10/basecase/main.py")["main"](quick)
    assert results["left / 1000"] < results["parameters / 1000"] / 3
    assert results["trained on %"] > results["after the cut %"]
    assert abs(results["in 8 bits %"] - results["trained on %"]) < 5


def test_unstructured_prune(example):
    quick = ["--samples", "200", "--epochs", "2", "--more-epochs", "2", "--onnx", "sparse.onnx"]
    results = example("unstructured_prune/cifar10/main.py")["main"](quick)
    assert 77 < results["zeros %"] < 80  # the first and the last layer keep theirs
    assert results["step by step %"] > results["all at once %"]
    assert Path("sparse.onnx").is_file()


def test_unstructured_prune_bert(example):
    quick = ["--samples", "800", "--epochs", "8", "--ratios", "0.5"]
    results = example("unstructured_prune/GLUE/bert/main.py")["main"](quick)
    assert results["sparsegpt 50%"] > results["float %"] - 5 > 60  # chance: 50


# -- real data sets, in their formats --------------------------------------------------------------------
@pytest.fixture
def cifar(tmp_path):
    """CIFAR-10's binary version with two pictures per file: a label byte, then the three colour planes."""
    random = np.random.default_rng(0)
    rows = {
        name: random.integers(0, 256, (2, 3073), dtype=np.uint8)
        for name in ("test_batch", *map(str, range(6)))
    }
    for name, part in rows.items():
        part[:, 0] %= 10
        part.tofile(tmp_path / (f"data_batch_{name}.bin" if name.isdigit() else f"{name}.bin"))
    return tmp_path, rows


def test_cifar10_is_read_in_both_formats(example, cifar, tmp_path):
    folder, rows = cifar
    load = example("helpers/images.py")["load"]
    x, y, x_test, y_test = load(folder, 32, 100)
    assert x.shape == (10, 3, 32, 32) and y.tolist()[:2] == rows["1"][:, 0].tolist()
    want = (rows["test_batch"][1, 1:].reshape(3, 32, 32)[0] / 255 - 0.485) / 0.229
    assert np.allclose(x_test[1, 0].numpy(), want, atol=1e-5)

    arrays = tmp_path / "arrays"
    arrays.mkdir()
    for name, part in (("train20k", rows["1"]), ("test", rows["test_batch"])):
        pixels = part[:, 1:].reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1)
        np.savez(arrays / f"{name}.npz", x=pixels, y=part[:, 0])
    again = load(arrays, 32, 100)
    assert torch.equal(again[2], x_test) and torch.equal(again[3], y_test)


def test_image_folders_are_read(example, tmp_path):
    image = pytest.importorskip("PIL.Image")
    for part in ("train", "val"):
        for label, name in enumerate(("n01", "n02")):
            (tmp_path / part / name).mkdir(parents=True)
            image.new("RGB", (40, 30), (255 * label, 0, 0)).save(tmp_path / part / name / "a.png")
    _, y, x_test, y_test = example("helpers/images.py")["load"](tmp_path, 16, 10)
    assert y.tolist() == y_test.tolist() == [0, 1] and x_test.shape == (2, 3, 16, 16)
    assert torch.allclose(x_test[1, :, 5, 5], torch.tensor([0.515 / 0.229, -0.456 / 0.224, -0.406 / 0.225]))


def test_cola_is_read(example, tmp_path):
    rows = 'gj04\t1\t\tThe dog "barks .\ngj04\t0\t*\tThe dog bark .\n'
    for name in ("train.tsv", "dev.tsv"):
        (tmp_path / name).write_text(rows)
    train, test = example("helpers/sentences.py")["load"](tmp_path, 1)
    assert train == [(1, 'The dog "barks .')] and test[1] == (0, "The dog bark .")


def test_coco_is_read(example, tmp_path):
    image = pytest.importorskip("PIL.Image")
    (tmp_path / "annotations").mkdir()
    (tmp_path / "val2017").mkdir()
    image.new("RGB", (40, 20)).save(tmp_path / "val2017" / "a.png")
    about = {
        "categories": [{"id": 7}, {"id": 3}],
        "images": [{"id": 5, "file_name": "a.png", "width": 40, "height": 20}],
        "annotations": [{"image_id": 5, "category_id": 7, "bbox": [10, 5, 20, 10]}],
    }
    (tmp_path / "annotations" / "instances_val2017.json").write_text(json.dumps(about))
    coco = example(f"{PTQ}/coco2017/yolo_series/dataset.py")["coco"]
    x, boxes = coco(tmp_path, "val2017", 80, 10)
    assert x.shape == (1, 3, 80, 80) and boxes[0, 0].tolist() == [20, 20, 60, 60, 1] and boxes[0, 1, 4] == -1


def test_average_precision_of_known_boxes(example):
    """Two objects, three guesses: right, wrong, right. Precision 1 at recall 1/2, 2/3 at recall 1."""
    measure = example(f"{PTQ}/coco2017/yolo_series/model.py")["mean_average_precision"]
    truth = torch.tensor([[[0, 0, 10, 10, 0], [20, 20, 30, 30, 0]]]).float()
    found = torch.tensor([[0, 0, 10, 9, 0, 0.9], [50, 50, 60, 60, 0, 0.8], [20, 20, 30, 29, 0, 0.7]])
    assert measure([found], truth, 1) == pytest.approx(100 * (1 + 2 / 3) / 2)


# -- notebooks -------------------------------------------------------------------------------------------
@pytest.mark.parametrize("folder", [f"{PTQ}/cifar10/basecase", f"{QAT}/cifar10/basecase"])
def test_notebooks_run(example, folder, monkeypatch, capsys):
    monkeypatch.chdir(EXAMPLES / folder)
    cells = json.loads(Path("main.ipynb").read_text())["cells"]
    scope: dict[str, object] = {"__name__": "notebook"}
    for i, cell in enumerate(cell for cell in cells if cell["cell_type"] == "code"):
        exec(compile("".join(cell["source"]), f"{folder}/main.ipynb, code cell {i}", "exec"), scope)
        scope |= {"SAMPLES": 200, "EPOCHS": 2, "QAT_EPOCHS": 2} if i == 0 else {}
    printed = capsys.readouterr().out
    assert "mixed: " in printed if PTQ in folder else scope["trained"] > scope["calibrated"]
    assert not any(cell.get("outputs") for cell in cells)  # what they print belongs to whoever runs them


# -- without folders -------------------------------------------------------------------------------------
def test_mixed_precision(example, capsys):
    """Bits for the sensitive layers: better than 4 bits everywhere, smaller than 8 bits everywhere."""
    pytest.importorskip("sklearn")
    results = example("mixed_precision.py")["main"](epochs=2)
    percent, decibel, size = results["mixed"]
    assert percent > 90
    assert results["w4a8"][1] < decibel < results["w8a8"][1]
    assert results["w4a8"][2] < size < results["w8a8"][2]
    assert "dB left" in capsys.readouterr().out


def test_classic_script(example, tmp_path, capsys):
    pytest.importorskip("sklearn")
    script = example("classic_script.py")
    (tmp_path / "qconfig.yaml").write_text(script["QCONFIG"])
    results = script["main"](tmp_path / "qconfig.yaml", epochs=2)
    assert results["quantized"] > results["float"] - 3
    assert results["loaded"] == results["quantized"] > 90
    assert "int4" in capsys.readouterr().out


def test_every_example_has_a_test():
    """By its folder, or its own name; examples/llm has tests in tests/llm."""
    here = Path(__file__).read_text().replace("{PTQ}", PTQ).replace("{QAT}", QAT)
    scripts = [*EXAMPLES.glob("*.py"), *EXAMPLES.glob("*/**/main.py"), *EXAMPLES.glob("*/**/main.ipynb")]
    names = [path.relative_to(EXAMPLES).as_posix() for path in scripts if "llm" not in path.parts]
    assert len(names) > 12
    assert [name for name in names if name.removesuffix("/main.ipynb") not in here] == []


def test_examples_say_how_they_are_run():
    for script in EXAMPLES.glob("*/**/main.py"):
        text = script.read_text()
        assert text.count("python main.py") >= 2 and "--data" in text, script
        assert script.with_name("qconfig.yaml").is_file() or script.with_name("sconfig.yaml").is_file()
        assert "\ndef main(" in text
