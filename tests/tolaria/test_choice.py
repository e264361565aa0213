"""Which population trains the hosts of a run."""

import logging
from dataclasses import replace
from typing import Any

import pytest

from esper.growth.hosts.cnn import CNNHost
from esper.growth.hosts.mlp import MLPHost
from esper.leyline import ConfigError
from esper.tolaria.engine.recipe import HostRecipe
from esper.tolaria.fused.choice import choose_population
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
        assert choose_population(made, 64) == "looped"
    assert caplog.messages == ["hosts are looped: slot blocks.0.0 inside a block"]
    assert choose_population(made, 64, "looped") == "looped"
    with pytest.raises(
        ConfigError, match=r"cannot be fused: slot blocks\.0\.0 inside a block; use"
    ):
        choose_population(made, 64, "fused")


def test_who_asks_for_fused_hosts_gets_them_however_few() -> None:
    assert choose_population(recipe(), 1, "fused") == "fused"


def test_an_unknown_choice_is_refused() -> None:
    with pytest.raises(ConfigError, match="auto, looped or fused, got 'big'"):
        choose_population(recipe(), 4, "big")
