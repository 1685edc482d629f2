"""YAML files: what is refused names the file and the line; what is written reads back."""

from __future__ import annotations

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from sparsebit.config import Config, ConfigError, read_yaml, write_yaml
from sparsebit.config.yaml_io import _Loader


class Options(Config):
    bit: int = 8
    alpha: float = 0.5


@pytest.fixture
def file(tmp_path):
    def write(text: str | bytes):
        path = tmp_path / "my.yaml"
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
        return path

    return write


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", "the file is empty"),
        ("# only a comment\n", "the file is empty"),
        ("- BIT\n- 8\n", r"expected options \(KEY: value\), got a list"),
        ("just text", r"expected options \(KEY: value\), got a str"),
        ("BIT: 8\nALPHA: 1\nBIT: 4\n", "line 3, column 1: BIT is given twice"),
        ("A:\n  B: {C: 1, D: 2, C: 3}\n", "line 2, column 19: C is given twice"),
        ("BIT: [1, 2\n", "line 2, column 1: not valid YAML: expected ',' or ']'"),
        ("BIT: !!python/object/apply:os.getcwd []\n", "could not determine a constructor for the tag"),
        ("? [1, 2]\n: 3\n", "unhashable key"),
        (b"BIT: \xff\xfe\n", "not a text file in UTF-8"),
    ],
)
def test_bad_files(file, text, expected) -> None:
    path = file(text)
    for read in (read_yaml, Options.load, lambda p: Options.load(str(p))):
        with pytest.raises(ConfigError, match=expected) as error:
            read(path)
        assert str(error.value).startswith(f"{path}: ")


def test_missing_file_and_folder(tmp_path) -> None:
    with pytest.raises(ConfigError, match=r"nothing\.yaml: no such file"):
        Options.load(tmp_path / "nothing.yaml")
    with pytest.raises(ConfigError, match="cannot be read"):
        Options.load(tmp_path)


def test_a_wrong_option_names_the_key_and_notes_the_file(file) -> None:
    path = file("BITS: 4\n")
    with pytest.raises(ConfigError) as error:
        Options.load(path)
    assert str(error.value) == "BITS: unknown option; did you mean BIT?"
    assert getattr(error.value, "__notes__", [f"in {path}"]) == [f"in {path}"]


def test_exponents_are_numbers(file) -> None:
    # PyYAML alone reads 1e-3 as text
    assert Options.load(file("ALPHA: 1e-3")).alpha == 0.001
    assert read_yaml(file("A: [1e3, -2E+4, 1.5e-2, 1e, e3, '1e3']"))["A"] == [
        1e3,
        -2e4,
        0.015,
        "1e",
        "e3",
        "1e3",
    ]


def test_anchors_and_merge_keys_work(file) -> None:
    path = file("X: &x {BIT: 4, ALPHA: 1}\nY: {<<: *x, BIT: 2}\n")
    assert read_yaml(path)["Y"] == {"BIT": 2, "ALPHA": 1}


json_like = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


@settings(deadline=None)
@given(st.dictionaries(st.text(), json_like, min_size=1, max_size=4))
def test_what_is_written_reads_back(data) -> None:
    assert yaml.load(write_yaml(data), _Loader) == data
