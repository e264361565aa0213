"""Learning from episodes that were played before: recording them, cloning, offline learning."""

from esper.simic.lessons.episodes import (
    FILE,
    SIDE_BY_SIDE,
    Episodes,
    join,
    load_episodes,
    record_episodes,
    save_episodes,
)
from esper.simic.lessons.imitation import CloningConfig, CloningReport, clone
from esper.simic.lessons.offline import OfflineConfig, OfflineReport, learn_offline

__all__ = [
    "FILE",
    "SIDE_BY_SIDE",
    "CloningConfig",
    "CloningReport",
    "Episodes",
    "OfflineConfig",
    "OfflineReport",
    "clone",
    "join",
    "learn_offline",
    "load_episodes",
    "record_episodes",
    "save_episodes",
]
