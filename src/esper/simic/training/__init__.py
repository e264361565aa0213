"""Learning to grow by PPO: `config` holds every setting, `loop` plays and learns, `shard` and
`workers` hold the environments, `checkpoint` saves and restores `state`."""

from esper.simic.training.checkpoint import is_run, load_checkpoint, load_state, save_checkpoint
from esper.simic.training.config import TrainingConfig, load_config
from esper.simic.training.loop import Hooks, run_training
from esper.simic.training.policy_controller import LearnedController
from esper.simic.training.policy_folder import card_of, policy_files, write_policy
from esper.simic.training.replay import episode_env
from esper.simic.training.round_log import RoundLog
from esper.simic.training.scenes import (
    ShardSpec,
    most_steps,
    recipe_of,
    side_by_side,
    space_of,
)
from esper.simic.training.shard import Shard
from esper.simic.training.space import Space
from esper.simic.training.state import Best, TrainState, lasting_settings, new_state
from esper.simic.training.workers import (
    Cluster,
    Connect,
    Line,
    LostError,
    Reply,
    ShardServer,
    growth_environments,
    worker_devices,
)

__all__ = [
    "Best",
    "Cluster",
    "Connect",
    "Hooks",
    "LearnedController",
    "Line",
    "LostError",
    "Reply",
    "RoundLog",
    "Shard",
    "ShardServer",
    "ShardSpec",
    "Space",
    "TrainState",
    "TrainingConfig",
    "card_of",
    "episode_env",
    "growth_environments",
    "is_run",
    "lasting_settings",
    "load_checkpoint",
    "load_config",
    "load_state",
    "most_steps",
    "new_state",
    "policy_files",
    "recipe_of",
    "run_training",
    "save_checkpoint",
    "side_by_side",
    "space_of",
    "worker_devices",
    "write_policy",
]
