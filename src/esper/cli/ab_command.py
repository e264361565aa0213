"""`esper train ab`: two rewards compared by the policies that learn from them."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from esper.cli.options import growth_options, option
from esper.cli.printing import Output
from esper.cli.train_command import NOT_FOR_TRAINING, chosen_workers, given_settings, setting
from esper.leyline import ConfigError
from esper.leyline.constants import MOST_COUNT, MOST_ENVS, MOST_KEY


@dataclass(frozen=True)
class ABSettings:
    rewards: str = option("objective,shaped", "The two reward modes, separated by a comma.")
    keys: int = option(6, "Paired keys: a policy with each reward is trained on each.", min=2)
    first_key: int = option(0, "The first key; the others follow.", min=0, max=MOST_KEY - 10_000)
    hosts: int = option(16, "New hosts on which each policy is scored.", min=1, max=MOST_ENVS)
    task: str | None = setting("task", "What the hosts learn; default digits.")
    family: str | None = setting(
        "family", "Draw hosts from this family, and score on its validation hosts."
    )
    rounds: int | None = setting("rounds", "Rounds of each policy.", min=1, max=MOST_COUNT)
    envs: int | None = setting("envs", "Host trainings per round.", min=1, max=MOST_ENVS)
    group: int | None = setting("group", "Environments with the same host and data.", min=1)
    network: str | None = setting("network.kind", "flat, or set.")
    config: str | None = option(None, "TOML file with settings of both; flags override it.")
    out: str | None = option(None, "Folder for all runs. Default: runs/ab-TASK.")
    resume: bool = option(False, "Continue a comparison that was stopped or killed.")
    workers: str | None = option(None, "Processes that train hosts, or auto.")
    growth: Mapping[str, Any] = growth_options(without=NOT_FOR_TRAINING)


def ab(output: Output, settings: ABSettings) -> None:
    """Compare two rewards: train a policy with each on the same keys, and compare their scores.

    Prints the scores by key, their difference with its 95 % interval, and a verdict. Returns of
    different rewards are not comparable and not compared.

    Example:

      esper train ab --rewards objective,shaped --keys 6 --rounds 100 --out runs/ab
    """
    from esper.api import compare_rewards
    from esper.simic.training.config import load_config

    modes = [mode.strip() for mode in settings.rewards.split(",")]
    if len(modes) != 2:
        raise ConfigError(f"rewards must be two modes separated by a comma, got {modes}")
    given = given_settings(settings)
    first, second = (load_config(settings.config, {**given, "reward_mode": m}) for m in modes)
    out = Path(settings.out or f"runs/ab-{(first.family or first.task).replace(':', '-')}")

    def on_policy(reward: str, key: int, score: float) -> None:
        output.note(f"{reward}, key {key}: {score:.2f}")

    found = compare_rewards(
        first,
        second,
        out,
        keys=range(settings.first_key, settings.first_key + settings.keys),
        hosts=settings.hosts,
        resume=settings.resume,
        workers=chosen_workers(settings.workers),
        on_policy=on_policy,
    )
    gap, known = found.difference, found.difference.low is not None
    interval = f", 95 % interval {gap.low:.2f} to {gap.high:.2f}" if known else ""
    output.say(f"{modes[0]} - {modes[1]}: {gap.mean:+.2f}{interval}, {gap.n} keys")
    output.say(found.verdict)
    output.json({"out": str(out), **found.as_dict()})
