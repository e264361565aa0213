from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from esper.leyline import ConfigError
from esper.observatory import picture as picture_module
from esper.observatory.picture import draw_growth, in_lines
from esper.observatory.run_directory import RunDirectory
from view_support import row

STAGES = ("DORMANT", "TRAINING", "BLENDING", "FOSSILIZED")


@pytest.fixture
def figures(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The figures that were drawn, to ask them what they show."""
    made, make = [], picture_module.new_figure

    def remember(*size: float) -> Any:
        made.append(make(*size))
        return made[-1]

    monkeypatch.setattr(picture_module, "new_figure", remember)
    return made


def test_a_picture_is_drawn_from_the_folder_alone(tmp_path: Path, figures: list[Any]) -> None:
    for name, offset in (("run", 0.0), ("other", -3.0)):
        with RunDirectory.create(tmp_path / name, {}) as run:
            for step in range(12):
                score = 60 + step + offset if step != 5 else None
                run.metrics(row(step, STAGES[step // 3], val_score=score))
    picture = draw_growth(tmp_path / "run", "a title", {"host alone": tmp_path / "other"})
    assert picture.read_bytes().startswith(b"\x89PNG")
    curve, lanes = figures[0].axes
    assert [line.get_label() for line in curve.lines] == ["host alone", "grown"]
    assert [label.get_text() for label in lanes.get_yticklabels()] == ["blocks.0"]
    assert [text.get_text() for text in lanes.texts] == ["conv_light"]
    # One block per stage, each three steps long, and none while nothing grows.
    blocks = [path.get_extents() for bar in lanes.collections for path in bar.get_paths()]
    assert [(block.x0, block.x1) for block in blocks] == [(2.5, 5.5), (5.5, 8.5), (8.5, 11.5)]
    RunDirectory.create(tmp_path / "empty", {}).close()
    with pytest.raises(ConfigError, match="no steps yet"):
        draw_growth(tmp_path / "empty", "nothing")


def test_long_names_and_many_slots_stay_readable(tmp_path: Path, figures: list[Any]) -> None:
    modules = [f"model.encoder.layers.{i}.attention.self.output_dense" for i in range(12)]
    with RunDirectory.create(tmp_path / "run", {}) as run:
        for step in range(100):
            whole = row(step)
            for module in modules:
                # A new seed every fourth epoch: more names than there is room for.
                stage = "TRAINING" if step % 4 else "DORMANT"
                whole |= {f"{module}.stage": stage}
                whole |= {f"{module}.blueprint": None if step % 4 == 0 else "conv_light"}
            run.metrics(whole)
    draw_growth(tmp_path / "run", "digits, a/run/with/$two$/and/[/]/" + 12 * "long/" + ", key 0")
    (figure,) = figures
    renderer = figure.canvas.get_renderer()
    lanes = figure.axes[1]
    labels = lanes.get_yticklabels()
    assert [label.get_text().replace("\n", "") for label in labels] == [*modules[::-1], "blocks.0"]
    boxes = [label.get_window_extent(renderer) for label in labels]
    for lower, upper in pairwise(boxes):
        assert lower.y1 <= upper.y0 + 1
    texts = [text for text in lanes.texts if text.get_position()[1] == 0]
    assert len(texts) > 3
    for left, right in pairwise(text.get_window_extent(renderer) for text in texts):
        assert left.x1 <= right.x0
    assert lanes.get_window_extent(renderer).width > 0.6 * figure.bbox.width
    title = figure.get_suptitle()
    assert (
        title.replace("\n", "").replace(r"\$", "$").startswith("digits, a/run/with/$two$/and/[/]/")
    )
    assert figure.texts[0].get_window_extent(renderer).x1 <= figure.bbox.width


def test_names_break_after_dots_and_nothing_is_lost() -> None:
    assert in_lines("layer1", 10) == "layer1"
    assert in_lines("encoder.layers.0", 10) == "encoder.\nlayers.0"
    assert in_lines("a" * 25, 10) == "\n".join(["a" * 10, "a" * 10, "a" * 5])
    assert in_lines("$x$", 10) == r"\$x\$"
