"""What rewards and observations cost, against the training they belong to.

Parts that are compared are timed in turn in the same loop, so that a busy machine slows them alike;
figures are medians of CPU time. The last line is one JSON object.
"""

import argparse
import json
import time
from collections.abc import Callable
from functools import partial

import numpy as np
import torch
from overhead import interleaved

from esper.growth.blueprints.catalogue import default_catalogue
from esper.growth.hosts import MLPHost
from esper.leyline.growth_settings import GrowthSettings
from esper.simic.rewards.modes import MODES, compute_reward
from esper.tamiyo.controllers.simple import RandomController
from esper.tamiyo.policy.features import FeatureExtractionContext, signals_to_features
from esper.tolaria.engine.batches import TensorSource
from esper.tolaria.engine.event_log import Transition
from esper.tolaria.engine.objectives import accuracy, cross_entropy
from esper.tolaria.engine.population import LoopedPopulation
from esper.tolaria.engine.recipe import HostRecipe
from esper.tolaria.engine.run import GrowthEnv

GAMMA = 0.995
ENVS, SLOTS, STEPS = 64, 5, 12
# Settings that a mode cannot do without.
NEEDED = {"loss": {"baseline_loss": 2.3, "target_loss": 0.3, "typical_loss_delta_std": 0.1}}


def real_steps() -> tuple[list[Transition], list[float]]:
    """Random growth in ENVS small hosts of SLOTS slots: transitions, and seconds per step."""
    draw = torch.Generator().manual_seed(0)
    x, y = torch.randn(256, 8, generator=draw), torch.randint(0, 4, (256,), generator=draw)
    recipe = HostRecipe(
        build=partial(MLPHost, in_features=8, num_classes=4, hidden=8, n_layers=SLOTS),
        slots=tuple(f"blocks.{i}" for i in range(SLOTS)),
        data=TensorSource((x, y), (x, y), batch=64),
        loss=cross_entropy,
        score=accuracy,
        optimizer=partial(torch.optim.AdamW, lr=1e-2),
        catalogue=default_catalogue(),
    )
    env = GrowthEnv(
        LoopedPopulation(recipe, range(ENVS)),
        GrowthSettings(STEPS, on_panic="terminate", keep_best=False),
    )
    controller = RandomController()
    situation, transitions, seconds = env.reset(), [], []
    while situation.running.any():
        actions = controller.act(situation)
        begin = time.thread_time()
        transitions.append(env.step(actions))
        seconds.append(time.thread_time() - begin)
        situation = transitions[-1].after
    return transitions, seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=300)
    repeats = parser.parse_args().repeats
    torch.set_num_threads(1)
    transitions, step_seconds = real_steps()
    busy = max(transitions, key=lambda t: int(t.after.table.holds_seed.sum()))
    parts: dict[str, Callable[[], object]] = {
        f"reward_{name}": partial(
            compute_reward, busy, mode.config(mode=name, **NEEDED.get(name, {})), GAMMA
        )
        for name, mode in MODES.items()
    }
    parts["observation"] = partial(signals_to_features, FeatureExtractionContext(busy.after))
    median = {name: 1000 * value for name, value in interleaved(parts, repeats).items()}
    worst = max(median[f"reward_{name}"] for name in MODES) + median["observation"]
    host_step = 1000 * float(np.median(step_seconds))
    result = {
        "envs": ENVS,
        "slots": SLOTS,
        "seeds_held": int(busy.after.table.holds_seed.sum()),
        **{f"{name}_ms": round(value, 4) for name, value in median.items()},
        "environment_step_ms": round(host_step, 2),
        "worst_reward_and_observation_ms": round(worst, 4),
        "worst_share_of_a_step": round(worst / host_step, 5),
        "passed": worst / host_step < 0.02,
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
