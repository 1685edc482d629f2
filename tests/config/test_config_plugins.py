"""Sections whose options come from registered plug-ins."""

from __future__ import annotations

import pickle
from typing import Literal

import pytest
from pydantic import Field

from sparsebit.config import Config, ConfigError, PluginConfig
from sparsebit.registry import Registry

SHAPES: Registry = Registry("shape")


class Circle:
    class Params(Config):
        radius: float = 1.0
        line: Literal["SOLID", "DOTTED"] = "SOLID"


class Box:
    class Params(Config):
        width: int = 2
        height: int = 3

        def verify(self) -> None:
            if self.width > self.height:
                raise ConfigError(f"WIDTH: must not exceed HEIGHT, got {self.width}")


class Dot:  # no options, like a plug-in written for the old API
    pass


SHAPES.add(["circle"], Circle)
SHAPES.add(["box+"], Box)
SHAPES.add(["dot"], Dot)


class ShapeConfig(PluginConfig):
    type: str = "dot"
    size: int = 1

    @classmethod
    def registry(cls) -> Registry:
        return SHAPES


class Drawing(Config):
    shape: ShapeConfig = Field(default_factory=ShapeConfig)


def message(shape: object) -> str:
    with pytest.raises(ConfigError) as error:
        Drawing.load({"SHAPE": shape})
    return str(error.value)


@pytest.mark.parametrize("name", ["box+", "BOX_PLUS", "Box-Plus"])
def test_type_in_any_spelling(name) -> None:
    cfg = Drawing.load({"SHAPE": {"TYPE": name, name.upper(): {"WIDTH": 1}}})
    assert cfg.SHAPE.TYPE == "box+"
    assert cfg.shape.plugin is Box
    assert cfg.shape.params().width == cfg.SHAPE.BOX_PLUS.WIDTH == 1


def test_params_of_the_selected_and_of_a_named_plugin() -> None:
    shape = ShapeConfig.load({"TYPE": "circle", "CIRCLE": {"line": "dotted"}})
    assert shape.params() == Circle.Params(line="DOTTED")
    assert shape.params("BOX+") == Box.Params()
    assert shape.CIRCLE.RADIUS == shape.circle.radius == 1.0  # not given: the default
    assert ShapeConfig().params().to_dict() == {}


def test_reading_a_default_changes_nothing() -> None:
    cfg = Drawing()
    assert cfg.SHAPE.CIRCLE.RADIUS == 1.0
    assert cfg == Drawing()
    assert "CIRCLE" not in cfg.dump()


@pytest.mark.parametrize(
    ("shape", "expected"),
    [
        ({"TYPE": "circel"}, "SHAPE.TYPE: 'circel' is not a registered shape; did you mean circle?"),
        ({"TYPE": "hat"}, "SHAPE.TYPE: 'hat' is not a registered shape; known: box+, circle, dot"),
        ({"TYPE": 3}, "SHAPE.TYPE: expected text, got 3"),
        ({"CIRCEL": {}}, "SHAPE.CIRCEL: unknown option; did you mean CIRCLE?"),
        ({"HAT": {}}, "SHAPE.HAT: unknown option; options are TYPE, SIZE, CIRCLE, BOX+"),
        ({"CIRCLE": {"RADIUSS": 1}}, "SHAPE.CIRCLE.RADIUSS: unknown option; did you mean RADIUS?"),
        ({"CIRCLE": {"RADIUS": "x"}}, "SHAPE.CIRCLE.RADIUS: expected a number, got 'x'"),
        ({"CIRCLE": 3}, "SHAPE.CIRCLE: expected a section of options (KEY: value), got 3"),
        ({"BOX_PLUS": {"WIDTH": 9}}, "SHAPE.BOX+.WIDTH: must not exceed HEIGHT, got 9"),
        ({"BOX_PLUS": {}, "box+": {}}, "SHAPE.BOX+: given twice, in two spellings; keep one of them"),
        ({"DOT": {"X": 1}}, "SHAPE.DOT.X: unknown option; there are no options here"),
    ],
)
def test_errors(shape, expected) -> None:
    assert message(shape) == expected


def test_problems_of_fields_and_plugins_are_reported_together() -> None:
    lines = message({"SIZE": "x", "CIRCLE": {"RADIUSS": 1}, "HAT": 1}).splitlines()
    assert [line.split(":")[0] for line in lines] == ["SHAPE.SIZE", "SHAPE.CIRCLE.RADIUSS", "SHAPE.HAT"]


def test_changing_plugin_options() -> None:
    cfg = Drawing()
    new = cfg.override("SHAPE.BOX_PLUS.WIDTH", 1, "SHAPE.box+.HEIGHT", 9, "SHAPE.TYPE", "BOX_plus")
    assert new.shape.params() == Box.Params(width=1, height=9)
    assert new.to_dict()["SHAPE"] == {"TYPE": "box+", "SIZE": 1, "BOX+": {"WIDTH": 1, "HEIGHT": 9}}
    assert Drawing.load(new.to_dict()) == new == pickle.loads(pickle.dumps(new))
    cfg.defrost()
    cfg.SHAPE.CIRCLE.RADIUS = 2  # a section the file did not have
    with pytest.raises(ConfigError, match="RADIUS: expected a number"):
        cfg.SHAPE.CIRCLE.RADIUS = "x"
    cfg.freeze()
    assert cfg.shape.params("circle").radius == 2.0
    with pytest.raises(ConfigError, match="frozen"):
        cfg.SHAPE.CIRCLE.RADIUS = 3


def test_a_plugin_registered_later_is_known_to_old_configs() -> None:
    cfg = Drawing()
    assert not hasattr(cfg.shape, "star")
    SHAPES.add(["star"], Circle)
    try:
        assert cfg.SHAPE.STAR.RADIUS == 1.0
        assert cfg.override("SHAPE.STAR.RADIUS", 3).shape.star.radius == 3.0
    finally:
        del SHAPES._items["star"]
