"""How the hosts of a training run are trained is settled once, before anything is written."""

import tomllib
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from esper.api.training import resume_ppo, train_ppo
from esper.leyline import ConfigError
from esper.simic.training.shard import Shard
from esper.tolaria.engine.population import LoopedPopulation
from esper.tolaria.fused import choice
from esper.tolaria.fused.population import FusedPopulation
from training_support import tiny_config, tiny_run, tiny_task


@pytest.fixture
def used(monkeypatch: pytest.MonkeyPatch) -> list[type]:
    """The populations of every round that is played."""
    seen: list[type] = []
    real = Shard.reset

    def reset(self: Any, round_: int) -> Any:
        found = real(self, round_)
        seen.append(type(self.batches[0].env.population))
        return found

    monkeypatch.setattr(Shard, "reset", reset)
    return seen


def population_of(run: Path) -> str:
    return tomllib.loads((run / "config.toml").read_text())["growth"]["population"]


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


def test_what_was_chosen_holds_for_good(
    tmp_path: Path, used: list[type], monkeypatch: pytest.MonkeyPatch
) -> None:
    tiny_run(tmp_path / "run", rounds=1, envs=3)
    monkeypatch.setattr(choice, "FEWEST_FUSED_HOSTS", 1)  # the rule of a later version
    resume_ppo(tmp_path / "run", task=tiny_task(), rounds=2)
    assert used == [LoopedPopulation] * 2
    assert population_of(tmp_path / "run") == "looped"
    tiny_run(tmp_path / "new", rounds=1, envs=3)
    assert used[2:] == [FusedPopulation]


def test_hosts_that_cannot_be_fused_are_refused_before_anything_is_written(tmp_path: Path) -> None:
    task = replace(tiny_task(), slots=("blocks.0.0",))
    with pytest.raises(ConfigError, match=r"cannot be fused: slot blocks\.0\.0"):
        train_ppo(tiny_config(population="fused"), tmp_path / "run", task=task)
    assert not (tmp_path / "run").exists()
