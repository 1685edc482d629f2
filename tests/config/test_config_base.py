"""Config: reading, freezing, changing and writing, on a small tree of its own."""

from __future__ import annotations

import copy
import pickle
from typing import Annotated, Literal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import Field

from sparsebit.config import Config, ConfigError, did_you_mean


class Leaf(Config):
    bit: int = Field(8, ge=1, le=16)
    ratio: float = 0.5
    on: bool = False
    mode: Literal["Fast", "very-slow"] = "Fast"
    names: Annotated[list[str], Field(strict=False)] = []


class Node(Config):
    left: Leaf = Field(default_factory=Leaf)
    right: Leaf = Field(default_factory=Leaf)
    title: str = ""

    def verify(self) -> None:
        if self.left.bit > self.right.bit:
            raise ConfigError(
                f"LEFT.BIT: must not exceed RIGHT.BIT, got {self.left.bit} and {self.right.bit}"
            )


class Root(Config):
    node: Node = Field(default_factory=Node)


def message(data: object, cls: type[Config] = Node) -> str:
    with pytest.raises(ConfigError) as error:
        cls.load(data)
    return str(error.value)


# -- reading ---------------------------------------------------------------------------------------------
@settings(deadline=None)
@given(st.lists(st.booleans(), min_size=7, max_size=7))
def test_keys_in_any_letter_case(upper: list[bool]) -> None:
    def spell(text: str) -> str:
        return "".join(c.upper() if up else c for c, up in zip(text, upper))

    cfg = Node.load({spell("left"): {spell("bit"): 4}})
    assert cfg.left.bit == cfg.LEFT.BIT == cfg.Left.Bit == 4


def test_defaults_mappings_instances_and_empty_sections() -> None:
    assert Node.load({}) == Node() == Node.load({"LEFT": None, "RIGHT": {}})
    assert Node.load({"left": Leaf(bit=3)}).left.bit == 3
    assert Node(left={"BIT": 3}) == Node.load({"LEFT": {"BIT": 3}})


def test_unknown_attribute_names_its_neighbour() -> None:
    with pytest.raises(AttributeError, match=r"Leaf\.BITS: unknown option; did you mean BIT\?"):
        Leaf().BITS  # noqa: B018
    assert not hasattr(Leaf(), "bits")


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        ({"LEFT": {"BITS": 4}}, "LEFT.BITS: unknown option; did you mean BIT?"),
        (
            {"LEFT": {"ZZZZ": 4}},
            "LEFT.ZZZZ: unknown option; options are BIT, RATIO, ON, MODE, NAMES",
        ),
        ({"LEFT": {"BIT": "four"}}, "LEFT.BIT: expected an integer, got 'four'"),
        ({"LEFT": {"BIT": "8"}}, "LEFT.BIT: expected an integer, got '8'"),
        ({"LEFT": {"BIT": True}}, "LEFT.BIT: expected an integer, got True"),
        ({"LEFT": {"BIT": 8.0}}, "LEFT.BIT: expected an integer, got 8.0"),
        ({"LEFT": {"BIT": None}}, "LEFT.BIT: expected an integer, got None"),
        ({"LEFT": {"BIT": 17}}, "LEFT.BIT: must be less than or equal to 16, got 17"),
        ({"LEFT": {"RATIO": "half"}}, "LEFT.RATIO: expected a number, got 'half'"),
        ({"LEFT": {"RATIO": True}}, "LEFT.RATIO: expected a number, got True"),
        ({"LEFT": {"ON": 1}}, "LEFT.ON: expected true or false, got 1"),
        ({"LEFT": {"ON": "yes"}}, "LEFT.ON: expected true or false, got 'yes'"),
        ({"TITLE": 3}, "TITLE: expected text, got 3"),
        ({"LEFT": {"NAMES": 3}}, "LEFT.NAMES: expected a list, got 3"),
        ({"LEFT": {"NAMES": ["a", 3]}}, "LEFT.NAMES[1]: expected text, got 3"),
        ({"LEFT": {"MODE": "fst"}}, "LEFT.MODE: 'fst' is not one of Fast, very-slow; did you mean Fast?"),
        ({"LEFT": 4}, "LEFT: expected a section of options (KEY: value), got 4"),
        ({"LEFT": [4]}, "LEFT: expected a section of options (KEY: value), got [4]"),
        ({"LEFT": {"BIT": 4, "bit": 5}}, "LEFT.BIT: given twice, in two spellings; keep one of them"),
        ({"RIGHT": {"BIT": 4}}, "LEFT.BIT: must not exceed RIGHT.BIT, got 8 and 4"),
    ],
)
def test_error_messages(data: object, expected: str) -> None:
    assert message(data) == expected


def test_all_problems_at_once_and_paths_are_full() -> None:
    text = message({"NODE": {"left": {"BITS": 1, "ratio": "x"}, "RIGHT": {"Mode": 1}, "titel": ""}}, Root)
    assert text.splitlines() == [
        "NODE.LEFT.RATIO: expected a number, got 'x'",
        "NODE.LEFT.BITS: unknown option; did you mean BIT?",
        "NODE.RIGHT.MODE: 1 is not one of Fast, very-slow",
        "NODE.TITEL: unknown option; did you mean TITLE?",
    ]
    assert message({"NODE": {"RIGHT": {"BIT": 4}}}, Root).startswith("NODE.LEFT.BIT: must not exceed")


def test_constructor_raises_the_same_error() -> None:
    with pytest.raises(ConfigError, match=r"^LEFT\.BIT: expected an integer, got 'four'$"):
        Node(left={"bit": "four"})


def test_integers_stand_for_floats_and_tuples_for_lists() -> None:
    leaf = Leaf.load({"RATIO": 1, "NAMES": ("a", "b")})
    assert leaf.ratio == 1.0
    assert isinstance(leaf.ratio, float)
    assert leaf.names == ["a", "b"]


@pytest.mark.parametrize("text", ["very-slow", "VERY_SLOW", " Very-Slow "])
def test_choices_in_any_spelling(text: str) -> None:
    assert Leaf(mode=text).mode == "very-slow"


def test_did_you_mean() -> None:
    assert did_you_mean("bits", ["BIT", "TYPE"]) == "; did you mean BIT?"
    assert did_you_mean("colour", ["BIT", "TYPE"]) == ""


# -- frozen and defrosted --------------------------------------------------------------------------------
def test_frozen_by_default() -> None:
    cfg = Node()
    assert cfg.is_frozen()
    for change in (
        lambda: setattr(cfg.LEFT, "BIT", 4),
        lambda: setattr(cfg, "title", "x"),
        lambda: cfg.merge_from_list(["LEFT.BIT", 4]),
        lambda: cfg.merge_from_file("anything.yaml"),
    ):
        with pytest.raises(ConfigError, match=r"frozen.*override.*clone\(\) and defrost\(\)"):
            change()
    assert cfg == Node()


def test_defrost_and_freeze_are_recursive() -> None:
    cfg = Root()
    cfg.defrost()
    cfg.NODE.RIGHT.BIT = 16
    cfg.node.left.mode = "FAST"
    cfg.NODE.TITLE = "t"
    cfg.freeze()
    assert (cfg.node.right.bit, cfg.node.left.mode, cfg.NODE.TITLE) == (16, "Fast", "t")
    with pytest.raises(ConfigError, match="frozen"):
        cfg.NODE.RIGHT.BIT = 4


def test_assignment_is_validated_at_once() -> None:
    cfg = Node()
    cfg.defrost()
    with pytest.raises(ConfigError, match=r"^BIT: expected an integer, got 'four'$"):
        cfg.LEFT.BIT = "four"
    with pytest.raises(ConfigError, match=r"BITS: unknown option; did you mean BIT\?"):
        cfg.LEFT.BITS = 4
    with pytest.raises(ConfigError, match=r"LEFT\.BIT: expected an integer"):
        cfg.LEFT = {"BIT": "four"}
    assert cfg.left.bit == 8


def test_options_need_to_agree_only_when_frozen() -> None:
    cfg = Node()
    cfg.defrost()
    cfg.RIGHT.BIT = 4  # less than LEFT.BIT for a moment
    cfg.TITLE = "x"
    with pytest.raises(ConfigError, match=r"^LEFT\.BIT: must not exceed RIGHT\.BIT, got 8 and 4$"):
        cfg.freeze()
    cfg.LEFT.BIT = 2
    cfg.freeze()
    assert (cfg.left.bit, cfg.right.bit) == (2, 4)


def test_references_to_sections_stay_good() -> None:
    cfg = Node()
    cfg.defrost()
    right = cfg.RIGHT
    cfg.TITLE = "x"
    cfg.merge_from_list(["RIGHT.RATIO", 0.25])
    right.BIT = 9
    assert (cfg.right.bit, right.ratio) == (9, 0.25)
    cfg.freeze()
    assert cfg.right is right
    assert right.is_frozen()


def test_assigning_a_section_replaces_it_with_a_copy() -> None:
    cfg, leaf = Node(), Leaf(bit=9)
    cfg.defrost()
    cfg.RIGHT = leaf
    cfg.RIGHT.BIT = 10
    assert (cfg.right.bit, leaf.bit) == (10, 9)
    assert leaf.is_frozen()


def test_sections_are_never_shared() -> None:
    leaf = Leaf()
    cfg = Node(left=leaf, right=leaf)
    cfg.defrost()
    cfg.RIGHT.BIT = 9
    assert (leaf.bit, cfg.left.bit, cfg.right.bit) == (8, 8, 9)


# -- changing --------------------------------------------------------------------------------------------
def test_override_gives_a_changed_frozen_copy() -> None:
    cfg = Node()
    new = cfg.override("LEFT.BIT", 2, "right.MODE", "very_slow", "TITLE", "x")
    assert (new.left.bit, new.right.mode, new.title) == (2, "very-slow", "x")
    assert new.is_frozen()
    assert cfg == Node()
    assert cfg.override("RIGHT", {"BIT": 9}).right == Leaf(bit=9)
    assert cfg.override("LEFT.BIT", 9, "RIGHT.BIT", 9).left.bit == 9  # legal only together


@pytest.mark.parametrize(
    ("pairs", "expected"),
    [
        (("LEFT.BITS", 4), "LEFT.BITS: unknown option; did you mean BIT?"),
        (("LEFT.BIT.X", 4), "LEFT.BIT: expected an integer, got {'X': 4}"),
        (("LEFT.BIT",), "expected KEY, value, KEY, value, ..., got 1 items: ['LEFT.BIT']"),
        ((3, 4), "expected a key such as 'QUANTIZER.BIT', got 3"),
        (("LEFT.BIT", 9), "LEFT.BIT: must not exceed RIGHT.BIT, got 9 and 8"),
    ],
)
def test_override_errors(pairs: tuple[object, ...], expected: str) -> None:
    with pytest.raises(ConfigError) as error:
        Node().override(*pairs)
    assert str(error.value) == expected


def test_merge_from_list_takes_values_and_command_line_text() -> None:
    cfg = Node()
    cfg.defrost()
    cfg.merge_from_list(["LEFT.BIT", "4", "left.on", "True", "RIGHT.MODE", "very-slow", "LEFT.NAMES", ["a"]])
    assert cfg.left == Leaf(bit=4, on=True, names=["a"])
    assert cfg.right.mode == "very-slow"
    with pytest.raises(ConfigError, match=r"LEFT\.BIT: expected an integer, got 'four'"):
        cfg.merge_from_list(["LEFT.BIT", "four"])


def test_merge_from_file_keeps_what_the_file_does_not_say(tmp_path) -> None:
    (tmp_path / "c.yaml").write_text("left: {RATIO: 1}\nTITLE: t\n")
    cfg = Node(left={"bit": 4})
    cfg.defrost()
    cfg.merge_from_file(tmp_path / "c.yaml")
    assert cfg == Node(left=Leaf(bit=4, ratio=1.0), title="t")


# -- copies and text -------------------------------------------------------------------------------------
@pytest.mark.parametrize("frozen", [True, False])
@pytest.mark.parametrize(
    "copied", [lambda c: c.clone(), copy.deepcopy, lambda c: pickle.loads(pickle.dumps(c))]
)
def test_copies_are_equal_independent_and_keep_the_state(copied, frozen) -> None:
    cfg = Node(left={"bit": 3, "names": ["a"]}, title="t")
    if not frozen:
        cfg.defrost()
    twin = copied(cfg)
    assert twin == cfg
    assert twin.is_frozen() == twin.left.is_frozen() == frozen
    twin.defrost()
    twin.LEFT.BIT = 4
    twin.LEFT.NAMES.append("b")
    assert (cfg.left.bit, cfg.left.names) == (3, ["a"])


def test_text_is_yaml_with_upper_case_keys() -> None:
    cfg = Root(node={"left": {"mode": "very-slow"}})
    assert str(cfg) == cfg.dump()
    assert cfg.dump().startswith("NODE:\n  LEFT:\n    BIT: 8\n    RATIO: 0.5\n")
    assert cfg.to_dict()["NODE"]["LEFT"] == {
        "BIT": 8,
        "RATIO": 0.5,
        "ON": False,
        "MODE": "very-slow",
        "NAMES": [],
    }
    assert Root.load(cfg.to_dict()) == cfg


def test_equality_is_of_values_not_of_state() -> None:
    cfg = Node()
    cfg.defrost()
    assert cfg == Node()
    assert cfg != Node(title="x")
    assert Leaf() != Node()
    assert cfg != {}
