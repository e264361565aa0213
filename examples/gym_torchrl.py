"""PPO of TorchRL on the analytic growth problem, with its `MaskedCategorical`.

    python examples/gym_torchrl.py [--steps 40000]

With flat actions the mask in `info` is exact; TorchRL reads it beside the observation, and the
policy's distribution takes it as its argument.
"""

import argparse

import torch
from tensordict.nn import TensorDictModule
from torch import nn
from torchrl.data import Unbounded
from torchrl.envs import DTypeCastTransform, GymEnv, TransformedEnv, default_info_dict_reader
from torchrl.modules import MaskedCategorical, ProbabilisticActor, ValueOperator
from torchrl.objectives import ClipPPOLoss
from torchrl.objectives.value import GAE

import esper.gym

EPISODES, EPOCHS, MINIBATCHES = 16, 4, 4
LENGTH = 16


def environment() -> TransformedEnv:
    env = GymEnv(esper.gym.ANALYTIC, actions="flat", categorical_action_encoding=True)
    mask = Unbounded(shape=(env.action_spec.n,), dtype=torch.int8)
    env.set_info_dict_reader(default_info_dict_reader(["action_mask"], spec=[mask]))
    # Gymnasium has masks of whole numbers, TorchRL of truth values.
    return TransformedEnv(env, DTypeCastTransform(torch.int8, torch.bool, ["action_mask"]))


def layers(outputs: int) -> nn.Module:
    return nn.Sequential(
        nn.LazyLinear(64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, outputs)
    )


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=40_000)
    steps = parser.parse_args().steps
    torch.manual_seed(0)
    torch.set_num_threads(1)
    env = environment()
    env.set_seed(0)
    actor = ProbabilisticActor(
        TensorDictModule(layers(env.action_spec.n), ["observation"], ["logits"]),
        in_keys={"logits": "logits", "mask": "action_mask"},
        out_keys=["action"],
        distribution_class=MaskedCategorical,
        return_log_prob=True,
    )
    critic = ValueOperator(layers(1), in_keys=["observation"])
    start = env.reset()
    actor(start.clone())
    critic(start.clone())
    loss = ClipPPOLoss(actor, critic, entropy_coeff=0.02, normalize_advantage=True)
    gae = GAE(gamma=1.0, lmbda=0.95, value_network=critic)
    optimizer = torch.optim.Adam(loss.parameters(), lr=2e-3)
    for done in range(0, steps, EPISODES * LENGTH):
        with torch.no_grad():
            batch = torch.stack([env.rollout(LENGTH, actor) for _ in range(EPISODES)])
            gae(batch)
        returns = batch["next", "reward"].sum(1).mean()
        flat = batch.reshape(-1)
        for _ in range(EPOCHS):
            for chosen in torch.randperm(len(flat)).chunk(MINIBATCHES):
                parts = loss(flat[chosen])
                optimizer.zero_grad()
                (parts["loss_objective"] + parts["loss_critic"] + parts["loss_entropy"]).backward()
                nn.utils.clip_grad_norm_(loss.parameters(), 0.5)
                optimizer.step()
        print(f"{done + len(flat):7d} steps, mean return {returns:+.3f}")


if __name__ == "__main__":
    main()
