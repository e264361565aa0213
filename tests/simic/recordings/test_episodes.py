"""Recorded episodes: what was played is what is stored, and nothing else is read back."""

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from esper.leyline import OP, ConfigError, LifecycleOp, NullRecorder
from esper.simic.recordings.episodes import (
    FILE,
    Episodes,
    acted_on,
    join,
    load_episodes,
    record_episodes,
    save_episodes,
)
from esper.simic.training.config import load_config
from esper.tamiyo.controllers import make_controller
from esper.tamiyo.controllers.scripted import ScriptedController
from helpers import small_digits
from recorded import play_analytic, random_player

FREE = {"growth.steps": 5, "reward.param_cost": 0.0, "reward.compute_cost": 0.0, "ppo.gamma": 0.99}


def record(controller: Any, episodes: int = 3, key: int = 0, **given: Any) -> Episodes:
    task, data = small_digits(96)
    config = load_config(None, {**FREE, "key": key})
    return record_episodes(config, task, data, controller, episodes=episodes, **given)


@cache
def episodes() -> Episodes:
    return record(ScriptedController("2 GERMINATE r0c1 branch linear\n4 CULL r0c1\n", "two"))


def test_actions_are_those_of_the_controller() -> None:
    ops = episodes().actions[..., OP]
    expected = [LifecycleOp.WAIT, LifecycleOp.GERMINATE, LifecycleOp.WAIT, LifecycleOp.CULL]
    assert (ops[:, :4] == expected).all()
    assert episodes().actions[0, 1, 0] == 1


def test_rewards_without_costs_add_up_to_the_gain_in_score() -> None:
    scores: dict[int, list[float]] = defaultdict(list)

    class Scores(NullRecorder):
        def metrics(self, row: Mapping[str, Any]) -> None:
            scores[row["env"]].append(row["val_score"])

    found = record(make_controller("random"), recorder=Scores())
    gained = [(own[-1] - own[0]) / 100 for _, own in sorted(scores.items())]
    assert found.returns == pytest.approx(gained)
    assert np.ptp(gained) > 0.01


def test_recording_is_a_function_of_the_key() -> None:
    again = record(make_controller("random"), episodes=2)
    once = record(make_controller("random"), episodes=2)
    other = record(make_controller("random"), episodes=2, key=1)
    assert (once.observations == again.observations).all()
    assert not (once.observations == other.observations).all()


def test_an_episode_does_not_depend_on_how_many_are_recorded() -> None:
    fewer, more = (record(make_controller("random"), episodes=n) for n in (1, 3))
    assert (fewer.actions == more.actions[:1]).all()
    assert (fewer.rewards == more.rewards[:1]).all()


def test_saved_and_loaded_are_equal(tmp_path: Path) -> None:
    save_episodes(tmp_path / "run", episodes())
    loaded = load_episodes(tmp_path / "run")
    assert loaded.space == episodes().space
    for name in ("observations", "actions", "rewards", "lengths", "slot_masks"):
        assert (getattr(loaded, name) == getattr(episodes(), name)).all()


def test_joining_pads_and_keeps_every_step() -> None:
    long = play_analytic(random_player(0), 3, key=0)
    short = replace(
        long.rows(np.array([1])),
        **{
            name: getattr(long, name)[1:2, :4]
            for name in (
                "op_masks", "slot_masks", "blueprint_masks", "blend_masks", "actions", "rewards",
            )
        },
        observations=long.observations[1:2, :5],
        lengths=np.array([4]),
    )  # fmt: skip
    both = join([short, long])
    assert len(both) == 4
    assert both.valid.sum() == 4 + long.valid.sum()
    assert len(acted_on(both)) == both.valid.sum()
    assert both.returns[0] == pytest.approx(long.rewards[1, :4].sum())
    assert both.masks().op[0, 4:].all(), "padding has to be a distribution too"


def test_episodes_of_other_problems_are_not_joined() -> None:
    with pytest.raises(ConfigError, match="different kinds"):
        join([episodes(), play_analytic(random_player(0), 1, key=0)])
    with pytest.raises(ConfigError, match="no episodes"):
        join([])


def _damage(path: Path, change: Any) -> None:
    from safetensors import safe_open

    with safe_open(path, framework="np") as file:
        header = file.metadata()
    arrays = dict(load_file(path))
    change(arrays)
    save_file(arrays, path, metadata=header)


def _illegal(arrays: dict[str, np.ndarray]) -> None:
    arrays["actions"][0, 0] = (0, 0, 0, int(LifecycleOp.FOSSILIZE))


def _out_of_range(arrays: dict[str, np.ndarray]) -> None:
    arrays["actions"][0, 1, 1] = 10_000


def _too_long(arrays: dict[str, np.ndarray]) -> None:
    arrays["lengths"][0] = 99


def _nan(arrays: dict[str, np.ndarray]) -> None:
    arrays["observations"][0, 0, 0] = np.nan


def _narrow(arrays: dict[str, np.ndarray]) -> None:
    arrays["observations"] = np.ascontiguousarray(arrays["observations"][..., :-1])


def _missing(arrays: dict[str, np.ndarray]) -> None:
    del arrays["rewards"]


def _wrong_type(arrays: dict[str, np.ndarray]) -> None:
    arrays["op_masks"] = arrays["op_masks"].astype(np.float32)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (_illegal, "not legal"),
        (_out_of_range, "not legal"),
        (_too_long, "longer than its arrays"),
        (_nan, "NaN"),
        (_narrow, "observations in"),
        (_missing, "other arrays.*rewards"),
        (_wrong_type, "op_masks in"),
    ],
)
def test_what_does_not_hold_up_is_refused(tmp_path: Path, change: Any, message: str) -> None:
    _damage(save_episodes(tmp_path, episodes()), change)
    with pytest.raises(ConfigError, match=message):
        load_episodes(tmp_path)


def test_files_that_hold_no_episodes_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no recorded episodes"):
        load_episodes(tmp_path)
    (tmp_path / FILE).write_bytes(b"cos\nsystem\n(S'true'\ntR.")
    with pytest.raises(ConfigError, match="damaged"):
        load_episodes(tmp_path)
    save_file({"x": np.zeros(1)}, tmp_path / FILE)
    with pytest.raises(ConfigError, match="does not hold episodes"):
        load_episodes(tmp_path)
