"""One episode of a training run by itself, to be looked at again."""

from esper.leyline import Recorder
from esper.simic.training.config import TrainingConfig
from esper.simic.training.round_log import RoundLog
from esper.simic.training.shard import Shard, ShardSpec, episode_key
from esper.tolaria import DataSplits, GrowthEnv, Task, make_env


def episode_env(
    config: TrainingConfig, task: Task, data: DataSplits, round_: int, env: int, recorder: Recorder
) -> GrowthEnv:
    """One environment of a round, new: with the same actions it does what it did beside others."""
    shard = Shard(ShardSpec(config, task, data, (env,)), RoundLog())
    return make_env(shard.recipe, [episode_key(config.key, round_, env)], shard.rules, recorder)
