"""Learning from episodes that were played before: recording them, cloning, offline learning."""

from esper.simic.lessons.episodes import (
    FILE,
    Episodes,
    join,
    load_episodes,
    save_episodes,
    shown_in,
)
from esper.simic.lessons.imitation import CloningConfig, CloningReport, clone
from esper.simic.lessons.offline import Advantage, OfflineConfig, OfflineReport, learn_offline
from esper.simic.lessons.recording import Tape, record_episodes

__all__ = [
    "FILE",
    "Advantage",
    "CloningConfig",
    "CloningReport",
    "Episodes",
    "OfflineConfig",
    "OfflineReport",
    "Tape",
    "clone",
    "join",
    "learn_offline",
    "load_episodes",
    "record_episodes",
    "save_episodes",
    "shown_in",
]
