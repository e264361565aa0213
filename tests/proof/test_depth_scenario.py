"""The scenario depth of evaluations, and `esper grow --depth`."""

from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from command_support import esper_here
from esper.api import find_controller
from esper.growth.hosts import TransformerHost
from esper.leyline import ConfigError
from esper.proof import EvaluationSettings, evaluate
from esper.proof.depth import ALL, saving, stack_size
from esper.tolaria.data.splits import DataSplits
from esper.tolaria.data.text import load_pydocs
from esper.tolaria.tasks import Task, find_task

ARM = "depth:0.3"


def results(grown: dict[int, float], static: dict[float, float]) -> list[Any]:
    """Of each key the score of the grown network at 0.5, and of all blocks at each share."""
    rows = [(f"{ARM} at 0.5", key, score) for key, score in grown.items()]
    rows += [
        (f"{ALL} at {share:g}", key, score) for share, score in static.items() for key in grown
    ]
    return [SimpleNamespace(arm=arm, key=key, test_score=score) for arm, key, score in rows]


def test_the_saving_is_interpolated_in_the_logarithm_of_the_compute() -> None:
    # Half-way between the scores of 0.5 and 1 all blocks need the root of 0.5: 1 - 0.5**0.5.
    found = saving(results({0: 50.0, 1: 50.0}, {0.5: 40.0, 1.0: 60.0}), ARM, (0.5, 1.0))
    assert found is not None
    assert "saves 29 % of their compute." in found
    # As good as with all of the compute, and as bad as with half of it.
    found = saving(results({0: 60.0, 1: 40.0}, {0.5: 40.0, 1.0: 60.0}), ARM, (0.5, 1.0))
    assert found is not None
    assert "saves 25 % (0 to 50) of their compute." in found


def test_a_score_out_of_range_is_said_to_be() -> None:
    found = saving(results({0: 70.0, 1: 50.0}, {0.5: 40.0, 1.0: 60.0}), ARM, (0.5, 1.0))
    assert found is not None
    assert "saves 40 % (29 to 50) of their compute; on 1 of 2 keys its score is outside" in found
    assert saving([], None, (0.5, 1.0)) is None


def tiny() -> tuple[Task, DataSplits]:
    data = load_pydocs(block_size=16)
    parts = {
        name: getattr(data, name)[:64]
        for name in ("train_x", "train_y", "val_x", "val_y", "test_x", "test_y")
    }
    host = partial(
        TransformerHost, vocab=256, n_embd=8, n_head=2, n_layer=3, block_size=16, dropout=0.0
    )
    task = replace(find_task("pydocs"), build=host, batch=16, batches_per_epoch=None)
    return task, replace(data, **parts)


def test_all_arms_have_the_same_compute() -> None:
    task, data = tiny()
    assert stack_size(task, data) == 3
    settings = EvaluationSettings((ARM,), keys=1, steps=11, scenario="depth", extra=(0.75, 1.0))
    report = evaluate(task, data, settings, find_controller)
    arms = {arm["arm"]: arm for arm in report.arms}
    for share in (0.75, 1.0):
        names = [f"{each} at {share:g}" for each in (ALL, "1 block", "2 blocks", ARM)]
        costs = [arms[name]["train_macs"] for name in names]
        assert max(costs) <= share * max(arms[f"{ALL} at 1"]["train_macs"] / 1.0, 1) * 1.1
        assert arms[names[3]]["params"] in (arms[names[0]]["params"], arms[names[1]]["params"])
    pairs = {(each.arm, each.versus) for each in report.comparisons}
    assert (f"{ARM} at 0.75", f"{ALL} at 1") in pairs
    assert (f"{ARM} at 1", "2 blocks at 1") in pairs
    assert report.crossover is not None
    assert report.crossover.startswith(f"With 75% of the compute {ARM} reaches")


def test_a_host_without_a_stack_is_refused() -> None:
    task = find_task("digits")
    with pytest.raises(ConfigError, match=r"digits has 0 stacks .* pydocs or linuxdocs"):
        stack_size(task, task.load(None))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--controller", "depth:0.3"], "is for --depth; give both"),
        (["--depth", "--slots", "blocks.0"], "leave out --slots"),
        (["--depth", "--start", "trained"], "leave out --start trained"),
        (["--depth", "--controller", "depth:soon"], "no controller 'depth:soon'"),
        (["--depth", "--task", "digits"], "exactly one stack of blocks"),
    ],
)
def test_options_that_exclude_growth_in_depth(
    words: list[str],
    says: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    task = () if "--task" in words else ("--task", "pydocs")
    assert esper_here(monkeypatch, "grow", *task, *words, cwd=tmp_path) == 2
    assert says in " ".join(capsys.readouterr().err.split())
    assert not list(tmp_path.iterdir())
