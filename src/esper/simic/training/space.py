"""What a policy is for: what it sees of a situation, and what its choices mean."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from esper.leyline import ActionMasks, ConfigError
from esper.simic.agent.network import Kind
from esper.simic.control.normalization import RunningMeanStd, Unscaled
from esper.tamiyo.policy.features import (
    FeatureExtractionContext,
    feature_names,
    feature_size,
    signals_to_features,
)
from esper.tamiyo.policy.set_features import (
    SET_COLUMNS,
    SetLayout,
    pad_masks,
    set_feature_names,
    set_features,
)
from esper.tamiyo.situation import Situation


@dataclass(frozen=True)
class Space:
    """How wide observations are, how many slots they show, and the names of the blueprints.

    To a flat network the order of slots and blueprints is their meaning. A network over sets takes
    any: hosts with fewer slots are shown with absent ones beside theirs.
    """

    observation_dim: int
    num_slots: int
    blueprints: tuple[str, ...]
    kind: Kind = "flat"

    @staticmethod
    def of(num_slots: int, blueprints: Sequence[str], kind: Kind = "flat") -> "Space":
        count = len(blueprints)
        flat = kind == "flat"
        size = feature_size(num_slots, count) if flat else SetLayout(num_slots, count).size
        return Space(size, num_slots, tuple(blueprints), kind)

    @staticmethod
    def from_tree(tree: Mapping[str, Any]) -> "Space":
        """The inverse of `tree`; raises ConfigError, KeyError, TypeError or ValueError."""
        kind = tree.get("kind", "flat")
        if kind not in ("flat", "set"):
            raise ConfigError(f"no observation is of kind {kind!r}")
        if kind == "set" and tree.get("columns") != SET_COLUMNS:
            raise ConfigError("what was seen had other columns than this version of Esper shows")
        names = tuple(str(name) for name in tree["blueprints"])
        size, slots = int(tree["observation_dim"]), int(tree["num_slots"])
        return Space(size, slots, names, kind)

    def tree(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "observation_dim": self.observation_dim,
            "num_slots": self.num_slots,
            "blueprints": list(self.blueprints),
            "kind": self.kind,
            **({"columns": SET_COLUMNS} if self.kind == "set" else {}),
        }

    def look(self, situation: Situation) -> tuple[np.ndarray, ActionMasks]:
        """Raw observations float32 [E, observation_dim], and the masks that go with them."""
        if self.kind == "flat":
            return signals_to_features(FeatureExtractionContext(situation)), situation.masks
        seen = set_features(situation, self.num_slots)
        return seen, pad_masks(situation.masks, self.num_slots)

    def names(self, modules: Sequence[str]) -> list[tuple[str, str]]:
        """(block, entry) of each column of the observation of a host with these slots."""
        if self.kind == "flat":
            return feature_names(modules, self.blueprints)
        return set_feature_names(modules, self.blueprints)

    def new_scale(self) -> RunningMeanStd:
        """What is to learn the scales of observations, if they need any."""
        return RunningMeanStd((self.observation_dim,)) if self.kind == "flat" else Unscaled()
