"""What is there to learn on `digits`? Every blueprint in every slot, planted at once and kept.

    python benchmarks/landscape.py [--episodes 8] [--incubation isolated]

Each row is one script: a seed germinates at the first step and is fossilised as soon as that is
legal. All scripts see the same hosts. The last line is one JSON object: for every script what it
adds to the final validation score (pp) and to the return of `objective`, over no growth, with
standard errors of the paired differences.
"""

import argparse
import json

import numpy as np
import torch

from esper.growth.blueprints.catalogue import default_catalogue
from esper.leyline.growth_settings import GrowthSettings
from esper.simic.rewards.config import ObjectiveRewardConfig
from esper.simic.rewards.modes import compute_reward
from esper.tamiyo.controllers import make_controller
from esper.tamiyo.controllers.scripted import ScriptedController
from esper.tamiyo.situation import Controller
from esper.tolaria.data.catalogue import data_root
from esper.tolaria.engine import run
from esper.tolaria.engine.event_log import Transition
from esper.tolaria.engine.recipe import HostRecipe
from esper.tolaria.engine.run import GrowthEnv
from esper.tolaria.tasks import find_task

TASK = find_task("digits")
FIRST_KEY = 2_000_000  # hosts that no evaluation and no tuning uses


def make_env(recipe: HostRecipe, episodes: int, rules: GrowthSettings) -> GrowthEnv:
    return run.make_env(recipe, range(FIRST_KEY, FIRST_KEY + episodes), rules)


def play(env: GrowthEnv, controller: Controller) -> np.ndarray:
    """[2, episodes]: final validation score in pp, undiscounted return."""
    returns = np.zeros(env.n_envs)

    def add(transition: Transition) -> None:
        returns[:] += compute_reward(transition, ObjectiveRewardConfig(), 1.0).total

    run.play(env, controller, on_step=add)
    return np.stack([env.score, returns])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--episodes", type=int, default=8)
    parser.add_argument("--incubation", choices=("isolated", "joint"), default="isolated")
    options = parser.parse_args()
    torch.set_num_threads(1)
    catalogue = default_catalogue()
    recipe = TASK.recipe(TASK.load(data_root()), catalogue)
    rules = GrowthSettings(TASK.steps, incubation=options.incubation, keep_best=False)
    env = make_env(recipe, options.episodes, rules)
    fits = env.garden.limits.fits
    alone = play(env, make_controller("static"))
    print(f"{'no growth':<20} score {alone[0].mean():6.2f}  return {alone[1].mean():.4f}")
    found = {}
    for slot, index in np.argwhere(fits).tolist():
        blueprint = catalogue.names[index]
        name = f"{blueprint}@r0c{slot}"
        script = f"1 GERMINATE r0c{slot} {blueprint} linear\nauto FOSSILIZE"
        env = make_env(recipe, options.episodes, rules)
        gained = play(env, ScriptedController(script, name)) - alone
        error = gained.std(axis=1, ddof=1) / options.episodes**0.5
        (score, value), (score_error, value_error) = gained.mean(axis=1), error
        print(
            f"{name:<20} score {score:+6.2f} +-{score_error:.2f}  "
            f"return {value:+.4f} +-{value_error:.4f}",
            flush=True,
        )
        found[name] = {
            "score": round(score, 2),
            "score_error": round(score_error, 2),
            "return": round(value, 4),
            "return_error": round(value_error, 4),
        }
    print(json.dumps({"episodes": options.episodes, "gain_over_no_growth": found}))


if __name__ == "__main__":
    main()
