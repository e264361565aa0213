"""Which population trains the hosts of a run."""

import logging
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from esper.growth import CNNHost, MLPHost
from esper.leyline import ConfigError
from esper.tolaria import FusedPopulation, HostRecipe, LoopedPopulation, choice
from esper.tolaria.choice import choose_population
from helpers import small_digits


def recipe(**changes: Any) -> HostRecipe:
    task, data = small_digits(64, 48)
    return replace(task.recipe(data), **changes)


def wide(width: int) -> HostRecipe:
    return recipe(build=lambda: CNNHost(10, 3, width, in_channels=1))


@pytest.mark.parametrize(
    ("made", "n_envs", "kind"),
    [
        (recipe(), 3, "looped"),
        (recipe(), 4, "fused"),
        (wide(16), 64, "fused"),
        (wide(32), 64, "looped"),
        (
            recipe(build=lambda: MLPHost(64, hidden=256), slots=("blocks.0", "blocks.1")),
            64,
            "looped",
        ),
        (recipe(precision="bf16"), 64, "looped"),
    ],
)
def test_the_rule_looks_at_shape_and_number_only(
    made: HostRecipe, n_envs: int, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, "esper"):
        assert choose_population(made, n_envs) == kind
    (said,) = caplog.messages
    assert said.startswith(f"hosts are {kind}: ")


def test_hosts_that_cannot_be_fused_go_to_the_loop_by_themselves_with_the_reason(
    caplog: pytest.LogCaptureFixture,
) -> None:
    made = recipe(slots=("blocks.0.0",))
    with caplog.at_level(logging.INFO, "esper"):
        assert choose_population(made, 64) == choose_population(made, 64, "measure") == "looped"
    assert caplog.messages == ["hosts are looped: slot blocks.0.0 inside a block"] * 2
    assert choose_population(made, 64, "looped") == "looped"
    with pytest.raises(
        ConfigError, match=r"cannot be fused: slot blocks\.0\.0 inside a block; use"
    ):
        choose_population(made, 64, "fused")


def test_who_asks_for_fused_hosts_gets_them_however_few() -> None:
    assert choose_population(recipe(), 1, "fused") == "fused"


@pytest.mark.parametrize(("ratio", "kind"), [(1.3, "fused"), (1.1, "looped")])
def test_a_measurement_decides_by_what_it_finds(
    ratio: float, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(choice, "measure", lambda *args: ratio)
    assert choose_population(wide(32), 4, "measure") == kind


def test_both_are_timed_on_the_same_work(monkeypatch: pytest.MonkeyPatch) -> None:
    """The clock stands still but while hosts train: by 3 in the loop, by 2 in the other."""
    now, seen = [0.0], {}

    def slowed(kind: Any, seconds: float) -> None:
        real = kind.train_epoch

        def train_epoch(self: Any, running: np.ndarray, step: int) -> Any:
            now[0] += seconds
            found = real(self, running, step)
            seen.setdefault(kind, []).append(found.seeds["gradient_norm"])
            return found

        monkeypatch.setattr(kind, "train_epoch", train_epoch)

    slowed(LoopedPopulation, 3.0)
    slowed(FusedPopulation, 2.0)
    monkeypatch.setattr(choice.time, "process_time", lambda: now[0])
    assert choice.measure(recipe(), 5) == 1.5
    looped, fused = (seen[kind] for kind in (LoopedPopulation, FusedPopulation))
    assert len(looped) == len(fused) == 1 + choice.TIMED_EPOCHS
    np.testing.assert_allclose(looped[0], fused[0], rtol=1e-3)
    assert (np.isfinite(looped[0]).sum(axis=1) == 1).all(), "a seed learns in every host"


def test_an_unknown_choice_is_refused() -> None:
    with pytest.raises(ConfigError, match="auto, looped, fused or measure, got 'big'"):
        choose_population(recipe(), 4, "big")
