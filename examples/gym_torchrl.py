"""Train PPO of TorchRL on the analytic growth problem, with `MaskedCategorical`.

    python examples/gym_torchrl.py [--steps 40000]

With flat actions the mask in `info` is exact. TorchRL reads it together with the observation, and
the policy's distribution takes it as an argument.
"""

import argparse
from typing import Any

import torch
from tensordict import TensorDictBase
from tensordict.nn import TensorDictModule
from torch import nn
from torchrl.data import Unbounded
from torchrl.envs import DTypeCastTransform, GymEnv, TransformedEnv, default_info_dict_reader
from torchrl.envs.utils import ExplorationType
from torchrl.modules import MaskedCategorical, ProbabilisticActor, ValueOperator
from torchrl.objectives import ClipPPOLoss
from torchrl.objectives.value import GAE

import esper.gym

EPISODES, EPOCHS, MINIBATCHES = 32, 4, 4


def environment(name: str = esper.gym.ANALYTIC, **settings: Any) -> TransformedEnv:
    env = GymEnv(name, actions="flat", categorical_action_encoding=True, **settings)
    mask = Unbounded(shape=(env.action_spec.n,), dtype=torch.int8)
    env.set_info_dict_reader(default_info_dict_reader(["action_mask"], spec=[mask]))
    # Masks are integers in Gymnasium, and booleans in TorchRL.
    return TransformedEnv(env, DTypeCastTransform(torch.int8, torch.bool, ["action_mask"]))


def layers(inputs: int, outputs: int) -> nn.Module:
    return nn.Sequential(
        *(nn.Linear(inputs, 64), nn.Tanh()),
        *(nn.Linear(64, 64), nn.Tanh()),
        nn.Linear(64, outputs),
    )


class Learner:
    """Actor, critic and the parts of TorchRL that PPO needs, for whole episodes [E, T]."""

    def __init__(self, inputs: int, actions: int, learning_rate: float = 2e-3) -> None:
        self.actor = ProbabilisticActor(
            TensorDictModule(layers(inputs, actions), ["observation"], ["logits"]),
            in_keys={"logits": "logits", "mask": "action_mask"},
            out_keys=["action"],
            distribution_class=MaskedCategorical,
            return_log_prob=True,
            # The default takes the most probable action, which would not explore.
            default_interaction_type=ExplorationType.RANDOM,
        )
        critic = ValueOperator(layers(inputs, 1), in_keys=["observation"])
        self.loss = ClipPPOLoss(
            self.actor, critic, entropy_coeff=0.02, critic_coeff=0.5, normalize_advantage=True
        )
        self.gae = GAE(gamma=1.0, lmbda=0.95, value_network=critic)
        self.optimizer = torch.optim.Adam(self.loss.parameters(), lr=learning_rate)

    def update(self, batch: TensorDictBase) -> None:
        with torch.no_grad():
            self.gae(batch)
        flat = batch.reshape(-1)
        for _ in range(EPOCHS):
            for chosen in torch.randperm(len(flat)).chunk(MINIBATCHES):
                parts = self.loss(flat[chosen])
                self.optimizer.zero_grad()
                (parts["loss_objective"] + parts["loss_critic"] + parts["loss_entropy"]).backward()
                nn.utils.clip_grad_norm_(self.loss.parameters(), 0.5)
                self.optimizer.step()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=40_000)
    steps = parser.parse_args().steps
    torch.manual_seed(0)
    torch.set_num_threads(1)
    env = environment()
    env.set_seed(0)
    learner = Learner(env.observation_spec["observation"].shape[0], env.action_spec.n)
    done = 0
    while done < steps:
        with torch.no_grad():
            batch = torch.stack([env.rollout(1000, learner.actor) for _ in range(EPISODES)])
        learner.update(batch)
        done += batch.numel()
        print(f"{done:7d} steps, mean return {batch['next', 'reward'].sum(1).mean():+.3f}")


if __name__ == "__main__":
    main()
