"""tamiyo: the one who decides.

Signals and observations, action masks, and the controllers: static, random, scripted, heuristic.
"""

from esper.tamiyo.controllers import (
    Controller,
    EachController,
    HeuristicConfig,
    HeuristicController,
    RandomController,
    ScriptedController,
    StaticController,
    controller_names,
    make_controller,
    wait,
)
from esper.tamiyo.policy.action_masks import (
    GrowthLimits,
    MaskedCategorical,
    compute_action_masks,
    usable_blueprints,
)
from esper.tamiyo.policy.features import (
    FeatureExtractionContext,
    feature_names,
    feature_size,
    signals_to_features,
)
from esper.tamiyo.policy.mask_reasons import why_no_blueprint, why_no_op, why_no_slot
from esper.tamiyo.policy.set_features import (
    SET_COLUMNS,
    SetLayout,
    pad_masks,
    set_feature_names,
    set_features,
)
from esper.tamiyo.situation import GivesReasons, Situation
from esper.tamiyo.slot_facts import SlotFacts, describe_slots
from esper.tamiyo.tracker import SignalTracker, score_noise

__all__ = [
    "SET_COLUMNS",
    "Controller",
    "EachController",
    "FeatureExtractionContext",
    "GivesReasons",
    "GrowthLimits",
    "HeuristicConfig",
    "HeuristicController",
    "MaskedCategorical",
    "RandomController",
    "ScriptedController",
    "SetLayout",
    "SignalTracker",
    "Situation",
    "SlotFacts",
    "StaticController",
    "compute_action_masks",
    "controller_names",
    "describe_slots",
    "feature_names",
    "feature_size",
    "make_controller",
    "pad_masks",
    "score_noise",
    "set_feature_names",
    "set_features",
    "signals_to_features",
    "usable_blueprints",
    "wait",
    "why_no_blueprint",
    "why_no_op",
    "why_no_slot",
]
