"""What the observation shows of a seed's gradients."""

import pytest

from esper.leyline import SeedStage
from esper.leyline import constants as c
from esper.tamiyo.policy.features import FeatureExtractionContext, signals_to_features
from reward_support import one_seed, situation


@pytest.mark.parametrize("norm", [1e-8, 1.0, 11.0])
def test_d18_the_observation_shows_the_health_that_was_measured(norm):
    table = one_seed(SeedStage.TRAINING, n=1)
    table.gradient_health[0, 0], table.gradient_norm[0, 0] = 0.25, norm
    context = FeatureExtractionContext(situation(table))
    telemetry = signals_to_features(context)[0, -10:]
    assert telemetry[1] == 0.25
    flags = norm < c.SEED_VANISHING_NORM, norm > c.SEED_EXPLODING_NORM
    assert tuple(telemetry[2:4]) == flags
