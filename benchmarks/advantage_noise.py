"""How noisy the advantage and the policy gradient are, with and without each remedy.

    python benchmarks/advantage_noise.py [--rounds 40] [--measured 120] [--key 0]

On the analytic growth problem with 64 environments in groups of 8, for hosts that are alike and
for hosts that differ more than actions do. Policy and critic are trained for some rounds with GAE
alone; then they rest, and what each baseline makes of the same rounds is compared. All baselines
estimate the same gradient, that of the joint policy; its noise is the trace of the covariance of
the gradient of a round, against the squared norm of the mean. For
returns: what becomes of a payment at the end of an episode of so many steps. The last line is one
JSON object.
"""

import argparse
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from claims.common import print_json, print_table
from esper.leyline import OP, draw_key
from esper.leyline.constants import NORMALIZER_CLIP
from esper.simic import analytic
from esper.simic.agent.advantages import compute_gae, head_relevance, leave_one_out
from esper.simic.agent.config import PPOConfig
from esper.simic.agent.network import FactoredRecurrentActorCritic, NetworkConfig
from esper.simic.agent.ppo import PPOAgent
from esper.simic.agent.rollout import action_draws, play_round
from esper.simic.agent.types import SequenceBatch
from esper.simic.control.normalization import RewardNormalizer

ENVS, GROUP, STEPS = 64, 8, analytic.HORIZON
SPREADS = (0.0, 2.0)
# Advantages and returns [N, T], groups [N] and valid steps [N, T] -> what is learnt from.
Baseline = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
BASELINES: dict[str, Baseline] = {
    "none": lambda advantages, returns, groups, valid: returns,
    "critic": lambda advantages, returns, groups, valid: advantages,
    # The alternatives that lost: whole episodes, and returns without the critic.
    "group: episodes": lambda advantages, returns, groups, valid: leave_one_out(
        returns[:, :1].expand_as(returns), groups, valid
    ),
    "group: returns": lambda advantages, returns, groups, valid: leave_one_out(
        returns, groups, valid
    ),
    "group + critic": lambda advantages, returns, groups, valid: leave_one_out(
        advantages, groups, valid
    ),
}


def trained(spread: float, rounds: int, key: int) -> tuple[PPOAgent, Callable]:
    """An agent after some rounds, and how it plays another."""
    sizes = NetworkConfig(
        analytic.OBSERVATION_DIM,
        analytic.NUM_SLOTS,
        analytic.NUM_BLUEPRINTS,
        feature_dim=32,
        lstm_hidden_dim=32,
    )
    network = FactoredRecurrentActorCritic(sizes, draw_key(key, "weights"))
    config = PPOConfig(learning_rate=2e-3, gamma=1.0, gae_lambda=1.0, entropy_coef=0.1)
    agent = PPOAgent(network, config)
    env, buffer = analytic.AnalyticGrowth(ENVS, key, GROUP, spread), agent.new_buffer(ENVS, STEPS)

    def play(round_: int) -> SequenceBatch:
        play_round(agent, env, buffer, round_, action_draws(key, round_, ENVS, STEPS))
        return buffer.sequences()

    for round_ in range(rounds):
        play(round_)
        agent.update(buffer, torch.Generator().manual_seed(draw_key(key, "shuffle", round_)))
    return agent, play


def gradient(agent: PPOAgent, batch: SequenceBatch, advantages: Tensor) -> Tensor:
    """Of the joint policy, by the parameters of the actor."""
    log_probs, _, _ = agent.network.evaluate_actions(
        batch.observations, batch.actions, batch.masks, batch.hidden
    )
    drawn = head_relevance(batch.actions[..., OP]) & batch.valid[..., None]
    terms = torch.where(drawn, log_probs * advantages[..., None], 0.0)
    named = agent.network.named_parameters()
    actor = [p for name, p in named if not name.startswith("value_head.")]
    parts = torch.autograd.grad(terms.sum() / batch.valid.sum(), actor)
    return torch.cat([part.reshape(-1) for part in parts]).double()


def baselines(rounds: int, measured: int, key: int) -> list[dict]:
    rows = []
    for spread in SPREADS:
        agent, play = trained(spread, rounds, key)
        variances = {name: [] for name in BASELINES}
        gradients = {name: [] for name in BASELINES}
        for round_ in range(rounds, rounds + measured):
            batch = play(round_)
            ends = batch.bootstrap_values, batch.terminated, batch.truncated
            advantages, returns = compute_gae(batch.rewards, batch.values, *ends, 1.0, 1.0)
            for name, baseline in BASELINES.items():
                credit = baseline(advantages, returns, batch.groups, batch.valid)
                variances[name].append(credit[batch.valid].var().item())
                gradients[name].append(gradient(agent, batch, credit))
        for name in BASELINES:
            found = torch.stack(gradients[name])
            noise, signal = found.var(dim=0).sum(), found.mean(dim=0).square().sum()
            rows.append(
                {
                    "hosts differ by": spread,
                    "baseline": name,
                    "advantage variance": float(np.mean(variances[name])),
                    "gradient noise": noise.item(),
                    "noise / signal": (noise / signal).item(),
                }
            )
    return rows


def payments(episodes: int = 64) -> list[dict]:
    """What an agent gets for a payment of 5, with a deviation of 1, at the end of an episode."""
    paid = torch.from_numpy(np.random.default_rng(0).normal(5.0, 1.0, size=episodes))
    rows = []
    for steps in (15, 60, 120, 240):
        normalizer = RewardNormalizer()
        for _ in range(steps - 1):
            normalizer(torch.zeros(episodes))
        got = normalizer(paid)
        rows.append(
            {
                "steps": steps,
                "rewards scaled: deviation": got.std().item(),
                "clipped": (got == NORMALIZER_CLIP).double().mean().item(),
                "returns scaled: deviation": (paid / paid.std()).std().item(),
            }
        )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--measured", type=int, default=120)
    parser.add_argument("--key", type=int, default=0)
    given = parser.parse_args()
    torch.set_num_threads(1)
    asked = given.rounds, given.measured, given.key
    result = {"baselines": baselines(*asked), "payments": payments()}
    for rows in result.values():
        print_table(rows)
        print()
    print_json({**vars(given), **result})


if __name__ == "__main__":
    main()
