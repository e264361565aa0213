"""The observations and choices of a policy."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from esper.leyline import BLEND_NAMES, NUM_OPS, ActionMasks, ConfigError
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
    """The width of observations, the number of slots in them, and the names of the blueprints.

    A flat network knows slots and blueprints by their order. A network over sets takes any number
    of them: observations of hosts with fewer slots are padded with absent ones.
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
            raise ConfigError(f"the kind of network must be flat or set, got {kind!r}")
        if kind == "set" and tree.get("columns") != SET_COLUMNS:
            raise ConfigError("the observations have other columns than this version of Esper uses")
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

    @property
    def choices(self) -> tuple[int, int, int, int]:
        """How many choices each head has, in the order of HEAD_NAMES."""
        return self.num_slots, len(self.blueprints), len(BLEND_NAMES), NUM_OPS

    def observe(self, situation: Situation) -> tuple[np.ndarray, ActionMasks]:
        """Raw observations float32 [E, observation_dim], and the masks that go with them."""
        if self.kind == "flat":
            return signals_to_features(FeatureExtractionContext(situation)), situation.masks
        observations = set_features(situation, self.num_slots)
        return observations, pad_masks(situation.masks, self.num_slots)

    def names(self, slots: Sequence[str]) -> list[tuple[str, str]]:
        """(block, entry) of each column of the observation of a host with these slots."""
        names = feature_names if self.kind == "flat" else set_feature_names
        return names(slots, self.blueprints)

    def new_normalizer(self) -> RunningMeanStd:
        """A new normaliser of observations; those over sets need no scaling."""
        return RunningMeanStd((self.observation_dim,)) if self.kind == "flat" else Unscaled()
