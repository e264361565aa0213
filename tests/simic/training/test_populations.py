"""How the hosts of a training run are trained is settled once, before anything is written."""

import tomllib
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from esper.api.training import resume_ppo, train_ppo
from esper.leyline import ConfigError
from esper.simic.training.shard import Shard
from esper.tolaria import FusedPopulation, LoopedPopulation, choice
from training_support import same_run, tiny_config, tiny_run, tiny_task


@pytest.fixture
def used(monkeypatch: pytest.MonkeyPatch) -> list[type]:
    """The populations of every round that is played."""
    seen: list[type] = []
    real = Shard.reset

    def reset(self: Any, round_: int) -> Any:
        found = real(self, round_)
        seen.append(type(self.parts[0].env.population))
        return found

    monkeypatch.setattr(Shard, "reset", reset)
    return seen


def population_of(run: Path) -> str:
    return tomllib.loads((run / "config.toml").read_text())["population"]


@pytest.mark.parametrize(
    ("flags", "kind"),
    [
        ({"envs": 4}, FusedPopulation),
        ({"envs": 3}, LoopedPopulation),
        ({"envs": 4, "population": "looped"}, LoopedPopulation),
        ({"envs": 1, "population": "fused"}, FusedPopulation),
        ({"envs": 4, "precision": "bf16"}, LoopedPopulation),
    ],
)
def test_the_run_says_what_it_came_to(
    tmp_path: Path, used: list[type], flags: dict[str, Any], kind: type
) -> None:
    tiny_run(tmp_path / "run", rounds=1, steps=2, **flags)
    assert used == [kind]
    assert population_of(tmp_path / "run") == ("fused" if kind is FusedPopulation else "looped")


def test_what_was_measured_holds_for_good(
    tmp_path: Path, used: list[type], monkeypatch: pytest.MonkeyPatch
) -> None:
    found = iter([0.9, 5.0])
    monkeypatch.setattr(choice, "measure", lambda *args: next(found))
    for name, rounds in (("stopped", 1), ("whole", 2)):
        tiny_run(tmp_path / name, rounds=rounds, population="measure" if rounds == 1 else "looped")
    assert population_of(tmp_path / "stopped") == "looped"
    resume_ppo(tmp_path / "stopped", task=tiny_task(), rounds=2)
    assert used == [LoopedPopulation] * 4
    assert next(found) == 5.0, "a resumed run does not measure again"
    same_run(tmp_path / "stopped", tmp_path / "whole")


def test_hosts_that_cannot_be_fused_are_refused_before_anything_is_written(tmp_path: Path) -> None:
    task = replace(tiny_task(), slots=("blocks.0.0",))
    with pytest.raises(ConfigError, match=r"cannot be fused: slot blocks\.0\.0"):
        train_ppo(tiny_config(population="fused"), tmp_path / "run", task=task)
    assert not (tmp_path / "run").exists()
