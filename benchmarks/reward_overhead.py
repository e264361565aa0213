"""What rewards, observations and diagnostics cost, against the training they belong to.

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
from torch import nn

from esper.growth import LifecycleRules, MLPHost, default_catalogue
from esper.simic.rewards import (
    ContributionRewardConfig,
    LossRewardConfig,
    ObjectiveRewardConfig,
    RewardConfig,
    compute_reward,
)
from esper.simic.telemetry import (
    AnomalyDetector,
    GradientEMATracker,
    GradientThresholds,
    collect_gradients,
    compute_lstm_health,
    newborn_rows,
    resident_mb,
)
from esper.tamiyo import FeatureExtractionContext, RandomController, signals_to_features
from esper.tolaria import GrowthEnv, HostRecipe, LoopedPopulation, TensorSource, Transition
from esper.tolaria.objectives import accuracy, cross_entropy

GAMMA = 0.995
ENVS, SLOTS, STEPS = 64, 5, 12
REWARDS: dict[str, RewardConfig] = {
    "objective": ObjectiveRewardConfig(),
    "shaped": ContributionRewardConfig(),
    "simplified": ContributionRewardConfig(mode="simplified"),
    "sparse": ContributionRewardConfig(mode="sparse"),
    "minimal": ContributionRewardConfig(mode="minimal"),
    "loss": LossRewardConfig(2.3, 0.3, 0.1),
}


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
    env = GrowthEnv(LoopedPopulation(recipe, range(ENVS)), LifecycleRules(STEPS))
    controller = RandomController()
    situation, transitions, seconds = env.reset(), [], []
    while situation.running.any():
        actions = controller.act(situation)
        begin = time.thread_time()
        transitions.append(env.step(actions))
        seconds.append(time.thread_time() - begin)
        situation = transitions[-1].after
    return transitions, seconds


class Policy(nn.Module):
    """A stand-in of the size of the agent's network: features, LSTM, five heads."""

    def __init__(self, features: int, hidden: int = 128) -> None:
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(features, hidden), nn.LayerNorm(hidden), nn.ReLU())
        self.lstm = nn.LSTM(hidden, hidden, batch_first=True)
        self.heads = nn.ModuleList(
            nn.Sequential(nn.Linear(hidden, 64), nn.ReLU(), nn.Linear(64, n))
            for n in (SLOTS, 14, 3, 4, 1)
        )

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, tuple[torch.Tensor, torch.Tensor]]:
        out, hidden = self.lstm(self.trunk(x))
        return torch.cat([head(out) for head in self.heads], dim=-1), hidden


class Update:
    """One optimiser step on a quarter of the environments, and the diagnostics that go with it."""

    def __init__(self, features: int) -> None:
        torch.manual_seed(0)
        self.policy = Policy(features)
        self.optimizer = torch.optim.Adam(self.policy.parameters(), lr=3e-4)
        self.batch = torch.randn(ENVS // 4, 30, features)
        self.detector, self.tracker = AnomalyDetector(), GradientEMATracker()
        self.thresholds = GradientThresholds.for_clip_norm(0.5)
        self.hidden: tuple[torch.Tensor, torch.Tensor] | None = None

    def step(self) -> None:
        self.optimizer.zero_grad(set_to_none=True)
        output, self.hidden = self.policy(self.batch)
        output.square().mean().backward()
        nn.utils.clip_grad_norm_(self.policy.parameters(), 0.5)
        self.optimizer.step()

    def diagnose(self) -> None:
        health = collect_gradients(self.policy.parameters(), self.thresholds)
        assert health is not None
        drift = self.tracker.update(health.norm, health.health)
        row = {"steps": 1, "ratio_max": 1.1, "ratio_min": 0.9, "op_entropy": 0.5}
        self.detector.check_update(
            row,
            current_round=1,
            total_rounds=10,
            norm_drift=drift.norm,
            health_drift=drift.health,
        )
        compute_lstm_health(self.hidden)
        resident_mb()


def per_step_diagnostics(transition: Transition) -> None:
    reward = compute_reward(transition, REWARDS["objective"], GAMMA)
    reward.rows(transition.after.step, transition.acted)
    newborn_rows(transition.after)


def interleaved(parts: dict[str, Callable[[], object]], repeats: int) -> dict[str, float]:
    """Median milliseconds of each part."""
    for part in parts.values():
        part()
    seconds: dict[str, list[float]] = {name: [] for name in parts}
    for _ in range(repeats):
        for name, part in parts.items():
            begin = time.thread_time()
            part()
            seconds[name].append(time.thread_time() - begin)
    return {name: 1000 * float(np.median(values)) for name, values in seconds.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=300)
    repeats = parser.parse_args().repeats
    torch.set_num_threads(1)
    transitions, step_seconds = real_steps()
    busy = max(transitions, key=lambda t: int(t.after.table.holds_seed.sum()))
    context = FeatureExtractionContext(busy.after)
    update = Update(signals_to_features(context).shape[1])
    update.step()
    parts: dict[str, Callable[[], object]] = {
        f"reward_{name}": partial(compute_reward, busy, config, GAMMA)
        for name, config in REWARDS.items()
    }
    parts["observation"] = partial(signals_to_features, context)
    parts["step_diagnostics"] = partial(per_step_diagnostics, busy)
    median = interleaved(parts, repeats)
    median |= interleaved(
        {"optimizer_step": update.step, "update_diagnostics": update.diagnose}, repeats // 3
    )
    worst = max(median[f"reward_{name}"] for name in REWARDS) + median["observation"]
    host_step = 1000 * float(np.median(step_seconds))
    # Update diagnostics run once per update of 4 epochs x 4 minibatches.
    share_update = median["update_diagnostics"] / (16 * median["optimizer_step"])
    share_step = median["step_diagnostics"] / host_step
    result = {
        "envs": ENVS,
        "slots": SLOTS,
        "seeds_held": int(busy.after.table.holds_seed.sum()),
        **{f"{name}_ms": round(value, 4) for name, value in median.items()},
        "environment_step_ms": round(host_step, 2),
        "worst_reward_and_observation_ms": round(worst, 4),
        "step_diagnostics_share": round(share_step, 5),
        "update_diagnostics_share": round(share_update, 5),
        "passed": worst < 1.0 and share_step < 0.02 and share_update < 0.02,
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
