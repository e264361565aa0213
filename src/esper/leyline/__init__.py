"""leyline: the contracts everybody shares.

Stages and legal transitions, actions and which heads they make relevant, slots, signals, reports,
events, and every constant that changes training. No torch modules and no logic beyond validation.
"""

from esper.leyline import constants
from esper.leyline.actions import (
    BLEND,
    BLEND_NAMES,
    BLUEPRINT,
    HEAD_NAMES,
    HEAD_RELEVANCE,
    NUM_OPS,
    OP,
    RELEVANT_HEADS,
    SLOT,
    ActionMasks,
    LifecycleOp,
)
from esper.leyline.errors import (
    ConfigError,
    DataMissingError,
    EsperError,
    EsperWarning,
    ExportError,
    ForgottenCallError,
    InvalidStateMachineError,
    PackageMissingError,
    SlotIdError,
    shortened,
)
from esper.leyline.gates import GATE_FOR_TARGET, GateLevel, GateResult
from esper.leyline.randomness import draw_key, generator
from esper.leyline.recorder import History, NullRecorder, Recorder, RoundRecorder
from esper.leyline.reports import EpisodeOutcome, SeedStateReport, TwinReport
from esper.leyline.signals import TrainingSignals
from esper.leyline.slot_config import SEED_LAYOUTS, TOPOLOGIES, InjectionSpec, SlotConfig
from esper.leyline.slot_id import format_slot_id, parse_slot_id, validate_slot_ids
from esper.leyline.stages import (
    HOLDS_SEED,
    IS_ACTIVE,
    IS_BLENDED,
    IS_FULL,
    IS_LIVE,
    LEGAL_TRANSITION,
    VALID_TRANSITIONS,
    SeedStage,
    is_active_stage,
    is_failure_stage,
    is_terminal_stage,
    is_valid_transition,
)
from esper.leyline.widening import LayerSpec, Step, Widening
