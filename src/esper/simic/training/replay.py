"""One episode of a training run by itself, to be looked at again."""

from esper.leyline import Recorder
from esper.simic.training.config import TrainingConfig
from esper.simic.training.scenes import Scenery, ShardSpec
from esper.tolaria import DataSplits, GrowthEnv, Task, find_family, make_env


def episode_env(
    config: TrainingConfig, task: Task, data: DataSplits, round_: int, env: int, recorder: Recorder
) -> GrowthEnv:
    """One environment of a round, new: with the same actions it does what it did beside others."""
    family = None if config.family is None else find_family(config.family)
    (scene,) = Scenery(ShardSpec(config, task, data, (env,), family=family)).of_round(round_)
    return make_env(scene.recipe, scene.keys, scene.rules, recorder)
