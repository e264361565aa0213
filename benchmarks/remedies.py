"""What each remedy against noise is worth: alone, all together and none, on paired training keys.

    python benchmarks/remedies.py [--family digits:trained] [--network set] [--rounds 10] [--keys 2]
                                  [--envs 32] [--group 8] [--arms plain,all] [--out runs/remedies]

One row per training is on disk as soon as it is finished, and a training that was killed goes on
from its checkpoint: ask for the same again, or for more keys. The measure, fixed beforehand, is
`objective`: the mean return of the most probable actions on hosts of the validation split, the same
hosts for every training. Beside it what the trainings themselves looked like, as means over their
rounds: the deviation of advantages in units of reward, the share of the variance of returns that
the critic explains, and the return in the last quarter. Ends with the comparisons with no remedy
(BCa intervals, sign flips, Holm) and one JSON object on the last line.
"""

import argparse
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from claims.common import compare, means, print_json, print_table, run_missing
from esper.api import resume_ppo, train_ppo
from esper.leyline import ConfigError
from esper.simic.agent import play_round
from esper.simic.control import RewardNormalizer
from esper.simic.training import TrainingConfig, TrainState, load_config
from esper.simic.training.round_log import Clock, RoundLog
from esper.simic.training.scaling import ScaledEnv
from esper.simic.training.scenes import ShardSpec
from esper.simic.training.shard import Shard
from esper.tolaria import Family, Member, data_root, find_family

REMEDIES: dict[str, dict[str, Any]] = {
    "group": {"ppo.group_baseline": True},
    "twin": {"network.critic_sees_twin": True},
    "returns": {"scale_returns": True},
    "heads": {"ppo.balance_heads": True},
}
ARMS = {
    "plain": {},
    **REMEDIES,
    "all": {name: value for each in REMEDIES.values() for name, value in each.items()},
}
# The hosts that trainings are measured on are those of this key; no training has it.
VALIDATION_KEY = 999_983
COLUMNS = ("objective", "last_quarter", "advantage_std", "explained_variance")


class OnValidation(Family):
    """The same family, whose episodes are those of validation members."""

    def episode(self, split: str, key: int) -> tuple[Member, int]:
        return super().episode("validation", key)


def config_of(given: argparse.Namespace, arm: str, key: int) -> TrainingConfig:
    flags = {name: getattr(given, name) for name in ("family", "rounds", "envs", "group")}
    return load_config(flags={**flags, "key": key, "network.kind": given.network, **ARMS[arm]})


def objective(config: TrainingConfig, state: TrainState, hosts: int) -> float:
    """Mean return of the most probable actions on so many validation hosts."""
    family = find_family(config.family)
    unseen = OnValidation(**{name: getattr(family, name) for name in family.__dataclass_fields__})
    data = family.task.load(data_root())
    measured = replace(config, envs=hosts, group=1, key=VALIDATION_KEY)
    spec = ShardSpec(measured, family.task, data, tuple(range(hosts)), family=unseen)
    # A copy: what is only measured must not move the scales of the run.
    scale = state.space.new_scale()
    scale.load_state_dict(state.observations.state_dict())
    rewards = {mode: RewardNormalizer() for mode in config.modes}
    env = ScaledEnv(Shard(spec, RoundLog()), scale, rewards, config.mode_of, Clock())
    steps = family.most_steps(data)
    play_round(state.agent, env, state.agent.new_buffer(hosts, steps), 0, None)
    return float(env.returns.mean())


def learning(run: Path, config: TrainingConfig) -> dict[str, float]:
    """What the rounds of a training looked like."""
    lines = (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    rows = [row for row in map(json.loads, lines) if row["kind"] == "round"]
    returns = [row["return"] for row in rows]
    scale = f"reward_std.{config.reward_mode}"
    return {
        "last_quarter": float(np.mean(returns[-max(1, len(returns) // 4) :])),
        "advantage_std": float(np.mean([row["advantage_std"] * row[scale] for row in rows])),
        "explained_variance": float(np.mean([row["explained_variance"] for row in rows])),
    }


def train(given: argparse.Namespace, arm: str, key: int) -> dict[str, float]:
    config, run = config_of(given, arm, key), Path(given.out) / f"{arm}-{key}"
    if (run / "config.toml").exists():
        state = resume_ppo(run, workers=given.workers)
    else:
        state = train_ppo(config, run, workers=given.workers)
    return {"objective": objective(config, state, given.hosts), **learning(run, config)}


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--family", default="digits:trained")
    parser.add_argument("--network", default="set", choices=("flat", "set"))
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--keys", type=int, default=2)
    parser.add_argument("--envs", type=int, default=32)
    parser.add_argument("--group", type=int, default=8)
    parser.add_argument("--hosts", type=int, default=32, help="validation episodes of a training")
    parser.add_argument("--arms", default=",".join(ARMS))
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--out", default="runs/remedies")
    given = parser.parse_args()
    given.arms = given.arms.split(",")
    for arm in given.arms:
        if arm not in ARMS:
            raise ConfigError(f"no arm {arm!r}; there are {', '.join(ARMS)}")
    return given


def main() -> None:
    given = arguments()
    torch.set_num_threads(1)
    settings = {
        name: getattr(given, name)
        for name in ("family", "network", "rounds", "envs", "group", "hosts")
    }
    trials = run_missing(
        Path(given.out) / "remedies.jsonl",
        settings,
        given.arms,
        range(given.keys),
        lambda arm, key: train(given, arm, key),
    )
    table = means(trials, given.arms, COLUMNS)
    print_table({"arm": arm, **row} for arm, row in table.items())
    others = [arm for arm in given.arms if arm != "plain"] if "plain" in given.arms else []
    compared = compare(trials, [(arm, "plain") for arm in others], "objective")
    print()
    print_table(compared)
    print_json({**settings, "keys": given.keys, "arms": table, "compared": compared})


if __name__ == "__main__":
    main()
