"""When a seed comes under suspicion, and when it just does not."""

import numpy as np
import pytest

from esper.leyline import SeedStage
from esper.simic.rewards.config import ContributionRewardConfig, ObjectiveRewardConfig
from esper.simic.rewards.modes import MODES, compute_reward
from reward_support import GAMMA, default_config, one_seed, transition


def suspected(c, gained, config):
    """The pattern that a seed which was not measured before falls under now, or None."""
    before = one_seed(SeedStage.BLENDING, n=1)
    after = one_seed(SeedStage.BLENDING, n=2, c=c, gained=gained, born_at=0.0)
    events = compute_reward(transition(before, after), config, GAMMA).suspicions
    assert len(events) <= 1
    return events[0].pattern if events else None


@pytest.mark.parametrize(
    ("c", "gained", "severity", "pattern", "ratio"),
    [
        (2.0, -0.5, "critical", "ransomware", None),
        (10.0, 1.0, "warning", "disproportion", 10.0),
    ],
)
@pytest.mark.parametrize("mode", list(MODES))
def test_004_h9_the_dispatcher_reports_reward_hacking(c, gained, severity, pattern, ratio, mode):
    config = default_config(mode)
    before = one_seed(SeedStage.BLENDING, slot=1, n_slots=2, n=1)
    after = one_seed(SeedStage.BLENDING, slot=1, n_slots=2, n=2, c=c, gained=gained)
    (event,) = compute_reward(transition(before, after), config, GAMMA).suspicions
    assert (event.severity, event.pattern, event.ratio) == (severity, pattern, ratio)
    assert (event.slot_id, event.blueprint, event.env) == ("r0c1", "conv_light", 0)
    assert (event.contribution, event.total_improvement) == (c, gained)
    # Told when it begins, not in every step.
    assert compute_reward(transition(after, after), config, GAMMA).suspicions == ()


@pytest.mark.parametrize("mode", list(MODES))
def test_004_h9_honest_seeds_are_not_suspected(mode):
    assert suspected(3.0, 2.0, default_config(mode)) is None


@pytest.mark.parametrize(
    ("c", "gained", "pattern"),
    [
        # Ransomware: more than 1 pp, and a loss of more than 0.2 pp.
        (1.0, -0.5, None),
        (np.nextafter(1.0, 2.0), -0.5, "ransomware"),
        (2.0, -0.2, None),
        (2.0, np.nextafter(-0.2, -1.0), "ransomware"),
        # Disproportion: five times an improvement, or more.
        (5.0, 1.0, "disproportion"),
        (np.nextafter(5.0, 0.0), 1.0, None),
        (5.0, 0.0, None),
        (5.0, 1e-300, "disproportion"),
        # What was not measured is not suspected.
        (np.nan, -0.5, None),
        (5.0, np.nan, None),
    ],
)
def test_the_thresholds_of_suspicion_are_exact(c, gained, pattern):
    assert suspected(c, gained, ObjectiveRewardConfig()) == pattern


@pytest.mark.parametrize("make", [ObjectiveRewardConfig, ContributionRewardConfig])
def test_the_ratio_of_disproportion_is_a_setting(make):
    for threshold, pattern in ((2.5, "disproportion"), (3.5, None)):
        assert suspected(3.0, 1.0, make(hacking_ratio_threshold=threshold)) == pattern


def test_no_contribution_is_in_proportion_to_anything():
    config = ObjectiveRewardConfig(hacking_ratio_threshold=0.0)
    assert suspected(0.0, 1.0, config) is None
    assert suspected(0.1, 1.0, config) == "disproportion"
