"""One episode from reset to outcome: the thin loop that every controller goes through."""

from collections.abc import Callable, Sequence

import numpy as np

from esper.leyline import EpisodeOutcome
from esper.tamiyo import Controller
from esper.tolaria.environment import GrowthEnv
from esper.tolaria.narrator import absent
from esper.tolaria.transition import Transition


def run_episode(
    env: GrowthEnv,
    controller: Controller,
    *,
    topology: Sequence[tuple[int, int]] = (),
    on_step: Callable[[Transition], None] = lambda transition: None,
) -> str:
    """Run all environments to their end; gives 'finished', or 'interrupted' after Ctrl-C."""
    controller.reset(env.n_envs)
    try:
        situation = env.reset(topology)
        while situation.running.any():
            transition = env.step(controller.act(situation))
            situation = transition.after
            on_step(transition)
    except KeyboardInterrupt:
        return "interrupted"
    return "finished"


def settle_outcome(
    env: GrowthEnv, index: int, *, task: str, controller: str, ended: str
) -> EpisodeOutcome:
    """Bring one host back to its best and sum up its episode; the recorder gets the row too."""
    evaluation, best_step = env.settle(index)
    garden = env.garden
    counts = {name: int(count[index]) for name, count in garden.counts.items()}
    held = np.flatnonzero(env.table.holds_seed[index]).tolist()
    outcome = EpisodeOutcome(
        env=index,
        key=int(env.population.keys[index]),
        task=task,
        controller=controller,
        steps=env.step_count,
        ended=ended,
        best_step=best_step,
        val_score=absent(evaluation.score[0]),
        val_loss=absent(evaluation.loss[0]),
        host_params=garden.host_params,
        params=int(garden.total_params()[index]),
        host_macs=garden.host_macs,
        macs=int(garden.total_macs()[index]),
        train_macs=int(garden.train_macs[index]),
        germinated=counts["germinated"],
        fossilized=counts["fossilized"],
        culled=counts["culled"],
        rollbacks=counts["rollbacks"],
        seeds=tuple(garden.narrator.report(env.table, index, slot) for slot in held),
    )
    env.recorder.outcome(outcome)
    return outcome
