"""leyline: the shared contracts.

Stages and legal transitions, actions and their relevant heads, slots, signals, reports, events,
and constants. No torch, and no logic beyond validation.
"""

from esper.leyline import constants
from esper.leyline.errors import (
    ConfigError,
    DataMissingError,
    EsperError,
    EsperWarning,
    ExportError,
    ForgottenCallError,
    InvalidStateMachineError,
    PackageMissingError,
    shortened,
)
from esper.leyline.events import History, NullRecorder, Recorder, RoundRecorder
from esper.leyline.randomness import draw_key, generator
from esper.leyline.reports import EpisodeOutcome, SeedStateReport, TrainingSignals, TwinReport
from esper.leyline.slots import (
    SEED_LAYOUTS,
    InjectionSpec,
    LayerSpec,
    SlotConfig,
    Step,
    Widening,
    format_slot_id,
)
from esper.leyline.stages import (
    BLEND,
    BLEND_NAMES,
    BLUEPRINT,
    GATE_FOR_TARGET,
    HEAD_NAMES,
    HEAD_RELEVANCE,
    HOLDS_SEED,
    IS_ACTIVE,
    IS_BLENDED,
    IS_FULL,
    IS_LIVE,
    LEGAL_TRANSITION,
    NUM_OPS,
    OP,
    RELEVANT_HEADS,
    REMOVAL_OF_KEPT,
    SLOT,
    VALID_TRANSITIONS,
    ActionMasks,
    GateLevel,
    LifecycleOp,
    SeedStage,
)
