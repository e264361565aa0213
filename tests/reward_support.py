"""Transitions made by hand, and a small real environment, for tests of rewards and attribution."""

from dataclasses import replace

import numpy as np
import torch

from esper.growth.blueprints.catalogue import default_catalogue
from esper.growth.hosts import MLPHost
from esper.growth.slot_table import SlotTable
from esper.leyline import (
    BLEND_NAMES,
    HEAD_NAMES,
    NUM_OPS,
    OP,
    SLOT,
    ActionMasks,
    LifecycleOp,
    SeedStage,
    SlotConfig,
    TrainingSignals,
)
from esper.simic.rewards.config import ContributionRewardConfig
from esper.simic.rewards.modes import MODES
from esper.tamiyo.situation import Situation
from esper.tolaria.engine.batches import TensorSource
from esper.tolaria.engine.event_log import Transition
from esper.tolaria.engine.objectives import accuracy, cross_entropy
from esper.tolaria.engine.population import LoopedPopulation
from esper.tolaria.engine.recipe import HostRecipe
from esper.tolaria.engine.run import GrowthEnv
from helpers import episode_settings

GAMMA = 0.995

# The values of the original, term by term, without our scale on all of shaping.
REFERENCE = ContributionRewardConfig(
    shaping_scale=1.0,
    holding_penalty="exponential",
    terminal_score_weight=0.05,
)

# What a loss reward cannot do without.
LOSSES = {"baseline_loss": 2.3, "target_loss": 0.3, "typical_loss_delta_std": 0.1}


def default_config(mode):
    """The config of a reward mode, as it is if nothing is set that need not be."""
    return MODES[mode].config(mode=mode, **(LOSSES if mode == "loss" else {}))


def signals(n_envs, score=50.0, loss=1.0, best=None, step=5):
    def each(value):
        return np.broadcast_to(np.asarray(value, dtype=float), (n_envs,)).copy()

    history = np.full((n_envs, 5), np.nan)
    return TrainingSignals(
        epoch=np.full(n_envs, step),
        global_step=np.full(n_envs, 10 * step),
        train_loss=each(loss),
        val_loss=each(loss),
        loss_delta=each(0.0),
        train_score=each(score),
        val_score=each(score),
        score_delta=each(0.0),
        plateau_epochs=np.zeros(n_envs, dtype=np.int64),
        host_stabilized=np.zeros(n_envs, dtype=bool),
        best_val_score=each(score if best is None else best),
        best_val_loss=each(loss),
        loss_history=history,
        score_history=history,
    )


def situation(table, host_params=1000, step=5, max_steps=25, **measured):
    n_envs, n_slots = table.shape
    catalogue = default_catalogue()
    return Situation(
        step=step,
        max_steps=max_steps,
        keys=np.arange(n_envs),
        running=np.ones(n_envs, dtype=bool),
        signals=signals(n_envs, step=step, **measured),
        table=table,
        masks=ActionMasks(
            op=np.ones((n_envs, NUM_OPS), dtype=bool),
            slot=np.ones((n_envs, NUM_OPS, n_slots), dtype=bool),
            blueprint=np.ones((n_envs, n_slots, len(catalogue)), dtype=bool),
            blend=np.ones((n_envs, len(BLEND_NAMES)), dtype=bool),
        ),
        slot_config=SlotConfig.for_grid(1, n_slots),
        catalogue=catalogue,
        host_params=host_params,
        total_params=host_params + table.params.sum(axis=1),
        left=np.full(n_envs, 1.0 - step / max_steps),
    )


def one_seed(
    stage, *, slot=0, n_slots=1, c=np.nan, gained=np.nan, born_at=50.0, n=0, age=None, params=0
):
    """A table of one environment with one seed; `gained` since its germination at `born_at`.

    Only with `born_at=0` is the improvement exactly `gained`, down to the last bit.
    """
    table = SlotTable.empty(1, n_slots)
    if stage == SeedStage.DORMANT:
        return table
    at = (0, slot)
    table.stage[at], table.blueprint[at], table.blend[at] = stage, 1, 0
    table.contribution[at], table.epochs_in_stage[at] = c, n
    table.epochs_total[at] = n if age is None else age
    table.score_at_birth[at], table.score[at] = born_at, born_at + gained
    table.params[at] = params
    return table


def transition(
    before,
    after,
    op=LifecycleOp.WAIT,
    slot=0,
    *,
    terminated=False,
    truncated=False,
    rolled_back=False,
    before_measured=None,
    train_macs=100,
    host_macs=100,
    host_params=1000,
    **measured,
):
    n_envs = before.shape[0]

    def flags(value):
        return np.broadcast_to(np.asarray(value, dtype=bool), (n_envs,)).copy()

    actions = np.zeros((n_envs, len(HEAD_NAMES)), dtype=np.int64)
    actions[:, OP], actions[:, SLOT] = op, slot
    first = situation(before, host_params=host_params, **(before_measured or measured))
    return Transition(
        before=first,
        actions=actions,
        after=situation(after, host_params=host_params, step=6, **measured),
        acted=np.ones(n_envs, dtype=bool),
        terminated=flags(terminated),
        truncated=flags(truncated),
        rolled_back=flags(rolled_back),
        train_macs=np.full(n_envs, train_macs),
        host_macs=np.full(n_envs, host_macs),
    )


def permute_slots(t: Transition, order: np.ndarray) -> Transition:
    """The same step with slot i called order[i]."""
    place = np.argsort(order)

    def move(s: Situation) -> Situation:
        columns = {name: values[:, place] for name, values in vars(s.table).items()}
        return replace(s, table=SlotTable(**columns))

    actions = t.actions.copy()
    acts = actions[:, OP] != LifecycleOp.WAIT
    actions[acts, SLOT] = order[actions[acts, SLOT]]
    return replace(t, before=move(t.before), after=move(t.after), actions=actions)


def blobs(n, key):
    """Four classes that a narrow network cannot quite tell apart."""
    draw = torch.Generator().manual_seed(key)
    labels = torch.randint(0, 4, (n,), generator=draw)
    angles = labels * (torch.pi / 2) + 1.5 * torch.randn(n, generator=draw).abs()
    radius = 1.0 + labels + 0.2 * torch.randn(n, generator=draw)
    return torch.stack([radius * angles.cos(), radius * angles.sin()], dim=1), labels


def small_env(keys, steps=30, *, min_contribution=-100.0, recorder=None, on_panic="terminate"):
    """A perceptron of three slots; seeds may be kept whatever they contribute."""
    recipe = HostRecipe(
        build=lambda: MLPHost(in_features=2, num_classes=4, hidden=4, n_layers=3),
        slots=("blocks.0", "blocks.1", "blocks.2"),
        data=TensorSource(blobs(96, 1), blobs(200, 2), batch=32),
        loss=cross_entropy,
        score=accuracy,
        optimizer=lambda params: torch.optim.AdamW(params, lr=3e-2),
        catalogue=default_catalogue(),
    )
    settings = episode_settings(
        steps, blending_steps=3, min_contribution=min_contribution, on_panic=on_panic
    )
    return GrowthEnv(LoopedPopulation(recipe, keys), settings, recorder=recorder)
