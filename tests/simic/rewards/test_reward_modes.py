"""The table of rewards, `compute_reward`, and configs."""

import math
from dataclasses import dataclass, replace

import numpy as np
import pytest

from esper.leyline import OP, ConfigError, LifecycleOp, SeedStage
from esper.simic.rewards.config import (
    ContributionRewardConfig,
    LossRewardConfig,
    ObjectiveRewardConfig,
    RewardConfig,
)
from esper.simic.rewards.modes import MODES, RewardMode, compute_reward
from esper.simic.rewards.terms import RewardComponents, Shaping
from esper.simic.training.config import load_config
from reward_support import GAMMA, LOSSES, default_config, one_seed, transition
from training_support import rows, tiny_run

NAN = float("nan")


def a(*values):
    return np.array(values, dtype=float)


# --- one edit ------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class WageConfig(RewardConfig):
    mode: str = "wage"
    wage: float
    nudge: float = 0.5


def wage(t, config, gamma):
    acts = t.actions[:, OP] != LifecycleOp.WAIT
    return {"wage": config.wage * acts, "nudge": Shaping(gamma * config.nudge * acts)}


@pytest.fixture
def germination():
    return transition(
        one_seed(SeedStage.DORMANT), one_seed(SeedStage.GERMINATED), LifecycleOp.GERMINATE
    )


def test_a_reward_is_one_entry_of_the_table(monkeypatch, germination):
    with pytest.raises(ConfigError, match="no reward mode 'wage'"):
        load_config(flags={"reward_mode": "wage"})
    monkeypatch.setitem(MODES, "wage", RewardMode(WageConfig, wage))
    flags = {"reward_mode": "wage", "ppo.gamma": 0.5}
    training = load_config(flags={**flags, "reward.wage": 3.0})
    found = compute_reward(germination, training.reward_config, training.ppo.gamma)
    assert (found.names, found.shaping) == (("wage", "nudge"), ("nudge",))
    assert found.values.tolist() == [[3.0, 0.25]]


def test_a_new_reward_is_paid_in_the_environments_of_a_run(monkeypatch, tmp_path):
    monkeypatch.setitem(MODES, "wage", RewardMode(WageConfig, wage))
    flags = {"reward.wage": 3.0, "reward.nudge": 0.0}
    state = tiny_run(tmp_path, rounds=1, reward_mode="wage", **flags)
    steps = [row for row in rows(tmp_path / "metrics.jsonl") if "reward" in row]
    assert {row["reward.wage"] for row in steps} == {0.0, 3.0}
    assert all(row["reward"] == row["reward.wage"] for row in steps)
    assert state.rewards.mean == pytest.approx(np.mean([row["reward"] for row in steps]))


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"reward_mode": "wages"}, "minimal, loss, wage; did you mean wage?"),
        ({"reward.wag": 1.0}, "no setting reward.wag; did you mean reward.wage?"),
        ({"reward.wage": "much"}, "reward.wage must be a number, got 'much'"),
        ({"reward.wage": -1.0}, "wage must be at least 0, got -1.0"),
        ({}, "reward mode 'wage' needs reward.wage to be set"),
        ({"reward.wage": 1.0, "reward.gamma": 0.5}, "configured for gamma=0.5"),
    ],
)
def test_a_new_reward_is_configured_like_any_other(monkeypatch, flags, message):
    monkeypatch.setitem(MODES, "wage", RewardMode(WageConfig, wage))
    with pytest.raises(ConfigError) as error:
        load_config(flags={"reward_mode": "wage", **flags})
    assert message in str(error.value)


def test_a_term_is_one_entry_of_its_mode(monkeypatch, germination):
    config, mode = load_config().reward_config, MODES["objective"]
    plain = compute_reward(germination, config, GAMMA)

    def with_curiosity(t, config, gamma):
        return {**mode.terms(t, config, gamma), "curiosity": Shaping(np.full(len(t.acted), 0.5))}

    monkeypatch.setitem(MODES, "objective", replace(mode, terms=with_curiosity))
    found = compute_reward(germination, config, GAMMA)
    assert found.names == (*plain.names, "curiosity")
    assert found.total == pytest.approx(plain.total + 0.5)
    assert (plain.shaping, found.shaping) == ((), ("curiosity",))
    assert found.shaped_ratio == pytest.approx(0.5 / abs(plain.total + 0.5))


@pytest.mark.parametrize(
    ("mode", "shaping"),
    [
        ("objective", set()),
        ("simplified", {"pbrs", "intervention"}),
        ("sparse", set()),
        ("minimal", set()),
        ("loss", {"pbrs"}),
    ],
)
def test_what_pays_for_the_result_is_no_shaping(mode, shaping, germination):
    config = default_config(mode)
    assert set(compute_reward(germination, config, GAMMA).shaping) == shaping


def test_in_shaped_all_is_shaping_but_the_result_and_its_costs(germination):
    found = compute_reward(germination, ContributionRewardConfig(), GAMMA)
    counts = {"rent", "terminal_fossils", "terminal_score", "rollback"}
    assert set(found.names) - set(found.shaping) == counts


@pytest.mark.parametrize(
    "config",
    [
        ContributionRewardConfig(mode="dense"),
        ContributionRewardConfig(mode="objective"),
        ObjectiveRewardConfig(mode="shaped"),
        RewardConfig(mode="objective"),
    ],
)
def test_a_mode_that_is_not_for_the_config_is_refused(config, germination):
    message = f"{type(config).__name__} has no reward mode '{config.mode}'; there are objective"
    with pytest.raises(ConfigError, match=message):
        compute_reward(germination, config, GAMMA)


# --- the discount --------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", list(MODES))
def test_004_c1_a_reward_with_another_gamma_than_the_run_is_refused(mode, germination):
    config = default_config(mode)
    compute_reward(germination, config, 0.9)
    compute_reward(germination, replace(config, gamma=0.99), 0.99)
    with pytest.raises(ConfigError, match=r"gamma=0\.995 but the run uses gamma=0\.99; leave"):
        compute_reward(germination, replace(config, gamma=0.995), 0.99)
    with pytest.raises(ConfigError, match="between 0 and 1"):
        compute_reward(germination, config, 1.5)


# --- settings ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "make",
    [
        lambda: ContributionRewardConfig(holding_penalty="quadratic"),
        lambda: ContributionRewardConfig(rent_weight=-1.0),
        lambda: ContributionRewardConfig(pbrs_weight=NAN),
        lambda: ContributionRewardConfig(contribution_weight=1e300),
        lambda: ContributionRewardConfig(param_budget=0),
        lambda: ContributionRewardConfig(holding_penalty_base=0.5),
        lambda: ObjectiveRewardConfig(param_cost=-0.1),
        lambda: ObjectiveRewardConfig(compute_cost=math.inf),
        lambda: ObjectiveRewardConfig(hacking_ratio_threshold=-1.0),
        lambda: LossRewardConfig(**LOSSES | {"target_loss": 2.4}),
        lambda: LossRewardConfig(**LOSSES | {"typical_loss_delta_std": 0.0}),
        lambda: LossRewardConfig(**LOSSES, grace_epochs=-1),
    ],
)
def test_configs_that_cannot_work_are_refused(make):
    with pytest.raises(ConfigError):
        make()


def test_thresholds_and_losses_may_be_negative():
    ContributionRewardConfig(improvement_safe_threshold=-1.0, contributing_threshold=-3.0)
    LossRewardConfig(baseline_loss=-1.0, target_loss=-2.0, typical_loss_delta_std=0.1)


# --- components ----------------------------------------------------------------------------------


@pytest.mark.parametrize("total", [0.0, 1e-9, -1e-9, 5e-324])
def test_004_m1_the_share_of_shaping_is_zero_for_a_total_of_nothing(total):
    acted = np.array([True])
    terms = {"pbrs": Shaping(a(1.0)), "score": a(total - 1.0)}
    assert RewardComponents.of(terms, acted).shaped_ratio == 0.0
    terms = {"pbrs": Shaping(a(1.0)), "score": a(3.0)}
    assert RewardComponents.of(terms, acted).shaped_ratio == 0.25


def test_environments_that_did_not_act_get_nothing():
    table = one_seed(SeedStage.HOLDING, c=5.0, gained=1.0, n=3, params=100)
    step = replace(transition(table, table, LifecycleOp.CULL, score=NAN), acted=np.array([False]))
    for mode in MODES:
        found = compute_reward(step, default_config(mode), GAMMA)
        assert not found.values.any()
        assert found.suspicions == ()


def test_a_score_that_is_not_finite_is_an_error_that_names_it():
    table = one_seed(SeedStage.DORMANT)
    with pytest.raises(ValueError, match=r"'score' of environment 0 is nan"):
        compute_reward(transition(table, table, score=NAN), ObjectiveRewardConfig(), GAMMA)
