"""Attribution: who contributed what, from real evaluations of coalitions of seeds."""

from esper.simic.attribution.game import CoalitionGame, seed_game
from esper.simic.attribution.shapley import (
    Attribution,
    attribute,
    attribute_seeds,
    exact_shapley,
    leave_one_out,
    pairwise_interactions,
    sampled_shapley,
)

__all__ = [
    "Attribution",
    "CoalitionGame",
    "attribute",
    "attribute_seeds",
    "exact_shapley",
    "leave_one_out",
    "pairwise_interactions",
    "sampled_shapley",
    "seed_game",
]
