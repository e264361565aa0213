"""One episode of a training run by itself, to be looked at again."""

from esper.leyline import Recorder
from esper.simic.training.config import TrainingConfig
from esper.simic.training.env_specs import RoundSpecs, ShardSpec
from esper.tolaria.data.splits import DataSplits
from esper.tolaria.engine.environment import GrowthEnv
from esper.tolaria.engine.run import make_env
from esper.tolaria.families import find_family
from esper.tolaria.tasks.base import Task


def episode_env(
    config: TrainingConfig, task: Task, data: DataSplits, round_: int, env: int, recorder: Recorder
) -> GrowthEnv:
    """One environment of a round, new: with the same actions it does what it did beside others."""
    family = None if config.family is None else find_family(config.family)
    (spec,) = RoundSpecs(ShardSpec(config, task, data, (env,), family=family)).of_round(round_)
    return make_env(spec.recipe, spec.keys, spec.rules, recorder)
