"""How noisy the advantage and the policy gradient are, with and without each remedy.

    python benchmarks/advantage_noise.py [--rounds 40] [--measured 120] [--key 0]

On the analytic growth problem with 64 environments in groups of 8, for hosts that are alike and
for hosts that differ more than actions do. Policy and critic are trained for some rounds with GAE
alone; then they rest, and what each baseline makes of the same rounds is compared. All baselines
estimate the same gradient, that of the joint policy; its noise is the trace of the covariance of
the gradient of a round, against the squared norm of the mean. A critic that sees the twin has led
to another policy. For heads: what each adds to the gradient of the shared trunk, counted alike or
by how often it is drawn. For returns: what becomes of a payment at the end of an episode of so many
steps. The last line is one JSON object.
"""

import argparse
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from claims.common import print_json, print_table
from esper.leyline import HEAD_NAMES, OP, draw_key
from esper.simic import analytic
from esper.simic.agent import (
    FactoredRecurrentActorCritic,
    NetworkConfig,
    PPOAgent,
    PPOConfig,
    action_draws,
    compute_gae,
    head_relevance,
    leave_one_out,
    play_round,
)
from esper.simic.agent.types import SequenceBatch
from esper.simic.control import RewardNormalizer

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


def trained(spread: float, twin: bool, rounds: int, key: int) -> tuple[PPOAgent, Callable]:
    """An agent after some rounds, and how it plays another."""
    sizes = NetworkConfig(
        analytic.OBSERVATION_DIM,
        analytic.NUM_SLOTS,
        analytic.NUM_BLUEPRINTS,
        feature_dim=32,
        lstm_hidden_dim=32,
        privileged_dim=2 if twin else 0,
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


def head_terms(agent: PPOAgent, batch: SequenceBatch, advantages: Tensor) -> Tensor:
    """Sum over the steps of log-prob times advantage, for each head, and how often it was drawn:
    [2, heads]."""
    log_probs, _, _ = agent.network.evaluate_actions(
        batch.observations, batch.actions, batch.masks, batch.hidden, batch.privileged
    )
    drawn = head_relevance(batch.actions[..., OP]) & batch.valid[..., None]
    terms = torch.where(drawn, log_probs * advantages[..., None], 0.0)
    return torch.stack([terms.sum(dim=(0, 1)), drawn.sum(dim=(0, 1)).float()])


def actor(agent: PPOAgent) -> list[Tensor]:
    named = agent.network.named_parameters()
    return [p for name, p in named if not name.startswith("value_head.")]


def trunk(agent: PPOAgent) -> list[Tensor]:
    return [p for name, p in agent.network.named_parameters() if "_head." not in name]


def gradient(objective: Tensor, parameters: list[Tensor]) -> Tensor:
    parts = torch.autograd.grad(objective, parameters, retain_graph=True)
    return torch.cat([part.reshape(-1) for part in parts]).double()


def baselines(rounds: int, measured: int, key: int) -> list[dict]:
    rows = []
    for spread in SPREADS:
        for twin in (False, True):
            agent, play = trained(spread, twin, rounds, key)
            variances = {name: [] for name in BASELINES}
            gradients = {name: [] for name in BASELINES}
            for round_ in range(rounds, rounds + measured):
                batch = play(round_)
                ends = batch.bootstrap_values, batch.terminated, batch.truncated
                advantages, returns = compute_gae(batch.rewards, batch.values, *ends, 1.0, 1.0)
                for name, baseline in BASELINES.items():
                    credit = baseline(advantages, returns, batch.groups, batch.valid)
                    variances[name].append(credit[batch.valid].var().item())
                    terms, _ = head_terms(agent, batch, credit)
                    joint = terms.sum() / batch.valid.sum()
                    gradients[name].append(gradient(joint, actor(agent)))
            for name in BASELINES:
                found = torch.stack(gradients[name])
                noise, signal = found.var(dim=0).sum(), found.mean(dim=0).square().sum()
                rows.append(
                    {
                        "hosts differ by": spread,
                        "critic sees twin": "yes" if twin else "no",
                        "baseline": name,
                        "advantage variance": float(np.mean(variances[name])),
                        "gradient noise": noise.item(),
                        "noise / signal": (noise / signal).item(),
                    }
                )
    return rows


def heads(rounds: int, measured: int, key: int) -> list[dict]:
    """Share of each head in the squared gradient of the trunk, counted alike or by its draws."""
    agent, play = trained(0.0, False, rounds, key)
    counts, alike, balanced = np.zeros(4), np.zeros(4), np.zeros(4)
    for round_ in range(rounds, rounds + measured):
        batch = play(round_)
        ends = batch.bootstrap_values, batch.terminated, batch.truncated
        advantages, _ = compute_gae(batch.rewards, batch.values, *ends, 1.0, 1.0)
        terms, drawn = head_terms(agent, batch, advantages)
        counts += drawn.detach().numpy()
        for head in range(len(HEAD_NAMES)):
            size = gradient(terms[head], trunk(agent)).square().sum().item()
            alike[head] += size / max(1.0, drawn[head].item()) ** 2
            balanced[head] += size / batch.valid.sum().item() ** 2
    return [
        {
            "head": name,
            "share of steps": counts[i] / counts[OP],
            "weight of one step": counts[OP] / counts[i],
            "share of gradient": alike[i] / alike.sum(),
            "balanced": balanced[i] / balanced.sum(),
        }
        for i, name in enumerate(HEAD_NAMES)
    ]


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
                "clipped": (got == normalizer.clip).double().mean().item(),
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
    result = {"baselines": baselines(*asked), "heads": heads(*asked), "payments": payments()}
    for rows in result.values():
        print_table(rows)
        print()
    print_json({**vars(given), **result})


if __name__ == "__main__":
    main()
