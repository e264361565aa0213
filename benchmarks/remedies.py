"""What each remedy against noise is worth: alone, both together and none, on paired training keys.

    esper train record --family digits:trained --controller each --group 10 --episodes 1280 --out R
    python benchmarks/remedies.py --episodes R [--rounds 100] [--keys 5] [--envs 64] [--group 8]

Trains on recorded hosts (`replayed.py`). One row per training is on disk as soon as it is finished:
ask for the same again after a kill, or for more keys. The measure, fixed beforehand, is
`objective`: the mean return of the most probable actions on hosts of shapes that no training has
seen, the same for every training. Beside it what the trainings themselves looked like, as means
over their rounds: the deviation of advantages in units of reward, the share of the variance of
returns that the critic explains, and the return in the last quarter. `fixed` is the candidate that
is best on the hosts that were learnt from, `best` the best of each host in hindsight. Ends with the
comparisons with no remedy (BCa intervals, sign flips, Holm) and one JSON object on the last line.
"""

import argparse
from pathlib import Path
from typing import Any

import numpy as np
import torch

from claims.common import compare, means, print_comparisons, print_json, print_table, run_missing
from esper.leyline import ConfigError
from esper.simic.recordings.episodes import join, load_episodes
from esper.simic.training.config import TrainingConfig, load_config
from esper.simic.training.env_specs import Space
from esper.simic.training.loop import Hooks, run_training
from esper.simic.training.round_log import RoundLog
from esper.simic.training.state import TrainState, new_state
from replayed import Replayed, Table

REMEDIES: dict[str, dict[str, Any]] = {
    "group": {"ppo.group_baseline": True},
    "returns": {"scale_returns": True},
}
ARMS = {
    "plain": {},
    **REMEDIES,
    "both": {name: value for each in REMEDIES.values() for name, value in each.items()},
}
COLUMNS = ("objective", "last_quarter", "advantage_std", "explained_variance")


def config_of(given: argparse.Namespace, arm: str, key: int) -> TrainingConfig:
    flags = {name: getattr(given, name) for name in ("family", "rounds", "envs", "group")}
    return load_config(flags={**flags, "key": key, **ARMS[arm]})


def objective(state: TrainState, table: Table) -> float:
    """Mean return of the most probable actions."""
    seen = state.observations.normalize(torch.from_numpy(table.seen))
    hidden = state.agent.initial_hidden(len(table))
    return float(table.returns(state.agent.act(seen, hidden, table.masks, None).actions).mean())


def train(config: TrainingConfig, space: Space, table: Table, held_out: Table) -> dict[str, float]:
    rows: list[dict[str, Any]] = []
    hooks = Hooks(on_round=lambda number, row, timing: rows.append(row))
    env = Replayed(table, config.envs, config.group, config.key)
    state = run_training(config, new_state(config, space), env, 1, RoundLog(), hooks=hooks)
    scale = f"reward_std.{config.reward_mode}"
    return {
        "objective": objective(state, held_out),
        "last_quarter": float(np.mean([row["return"] for row in rows[-max(1, len(rows) // 4) :]])),
        "advantage_std": float(np.mean([row["advantage_std"] * row[scale] for row in rows])),
        "explained_variance": float(np.mean([row["explained_variance"] for row in rows])),
    }


def without_learning(table: Table, held_out: Table) -> dict[str, float]:
    """Bounds on the same hosts: fixed rules, and the best candidate of each."""
    blueprints = table.planted.shape[2]
    mean = np.nanmean(table.planted.reshape(len(table), -1), axis=0)
    slot, blueprint = divmod(int(np.nanargmax(mean)), blueprints)
    every = held_out.planted.reshape(len(held_out), -1)
    return {
        "waiting": float(held_out.waited.mean()),
        "random": float(np.nanmean(every)),
        "fixed": float(np.nanmean(held_out.planted[:, slot, blueprint])),
        "best": float(np.fmax(np.nanmax(every, axis=1), held_out.waited).mean()),
    }


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--episodes", nargs="+", required=True, help="runs of `esper train record`")
    parser.add_argument("--family", default="digits:trained")
    parser.add_argument("--rounds", type=int, default=100)
    parser.add_argument("--keys", type=int, default=5)
    parser.add_argument("--envs", type=int, default=64)
    parser.add_argument("--group", type=int, default=8)
    parser.add_argument("--arms", default=",".join(ARMS))
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
    episodes = join([load_episodes(run) for run in given.episodes])
    table, held_out = Table.of(episodes).split()
    settings = {name: getattr(given, name) for name in ("family", "rounds", "envs", "group")}
    settings |= {"hosts": len(table), "unseen": len(held_out)}
    trials = run_missing(
        Path(given.out) / "remedies.jsonl",
        settings,
        given.arms,
        range(given.keys),
        lambda arm, key: train(config_of(given, arm, key), episodes.space, table, held_out),
    )
    found = means(trials, given.arms, COLUMNS)
    print_table({"arm": arm, **row} for arm, row in found.items())
    others = [arm for arm in given.arms if arm != "plain"] if "plain" in given.arms else []
    compared = compare(trials, [(arm, "plain") for arm in others], "objective")
    print()
    print_comparisons(compared)
    bounds = without_learning(table, held_out)
    print_json({**settings, **bounds, "keys": given.keys, "arms": found, "compared": compared})


if __name__ == "__main__":
    main()
