"""The state of a training run: everything that the next round depends on."""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor

from esper.growth.devices import to_host
from esper.leyline import ConfigError, draw_key
from esper.simic.agent.config import PPOConfig
from esper.simic.agent.network import FactoredRecurrentActorCritic, NetworkConfig
from esper.simic.agent.ppo import PPOAgent
from esper.simic.agent.set_network import SetActorCritic, new_network
from esper.simic.control.normalization import RewardNormalizer, RunningMeanStd
from esper.simic.telemetry.anomaly_detector import AnomalyDetector, Escalation
from esper.simic.telemetry.health import GradientEMATracker
from esper.simic.training.config import TrainingConfig
from esper.simic.training.env_specs import Space


@dataclass(frozen=True)
class BestPolicy:
    """The policy with the highest mean score on validation hosts so far; `round` is the number of
    rounds before it."""

    round: int
    score: float


@dataclass
class TrainState:
    """`round` is the next one to play; hosts are new in every round, so none are saved. `settings`
    are those that a run cannot change, by dotted name."""

    settings: dict[str, Any]
    space: Space
    agent: PPOAgent
    observations: RunningMeanStd
    rewards: RewardNormalizer
    round: int = 0
    detector: AnomalyDetector = field(default_factory=AnomalyDetector)
    escalation: Escalation = field(default_factory=Escalation)
    gradients: GradientEMATracker = field(default_factory=GradientEMATracker)
    best: BestPolicy | None = None


def new_state(config: TrainingConfig, space: Space, warm: TrainState | None = None) -> TrainState:
    """The state before the first round; with `warm`, its network and observation statistics."""
    of_space = (space.observation_dim, space.num_slots, len(space.blueprints))
    widths = {k: v for k, v in vars(config.network).items() if k not in ("kind", "op_bias")}
    sizes = NetworkConfig(*of_space, kind=space.kind, **widths)
    network = new_network(sizes, key=draw_key(config.key, "weights"))
    network.bias_ops(config.network.op_bias)
    observations = space.new_normalizer()
    if warm is not None:
        network.load_state_dict(_fitting(warm, space, sizes).state_dict())
        observations.load_state_dict(warm.observations.state_dict())
    return TrainState(
        settings=lasting_settings(config),
        space=space,
        agent=PPOAgent(network, config.ppo),
        observations=observations,
        rewards=RewardNormalizer(),
    )


def _fitting(warm: TrainState, space: Space, sizes: NetworkConfig) -> FactoredRecurrentActorCritic:
    """The network to start from, for this space; raises ConfigError if it does not fit."""
    network, same = warm.agent.network, warm.space == space
    if isinstance(network, SetActorCritic) and space.kind == "set":
        network, same = network.fitted(space.num_slots, len(space.blueprints)), True
    if not same or network.config != sizes:
        raise ConfigError(
            f"the policy to start from is for {warm.space.num_slots} slots, "
            f"{len(warm.space.blueprints)} blueprints and {warm.agent.network.config}; "
            f"this run has {space.num_slots}, {len(space.blueprints)} and {sizes}; use the same "
            "settings, or train both with network.kind = 'set'"
        )
    return network


def lasting_settings(config: TrainingConfig) -> dict[str, Any]:
    """The settings that a run cannot change once it has begun, without empty tables, as a
    checkpoint returns them."""
    flat = json.loads(json.dumps(config.flat()))
    return {name: value for name, value in flat.items() if name != "rounds" and value != {}}


def pack(state: TrainState) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Named tensors, and a dictionary for JSON; `versions` says what to do when it changes."""
    tensors, agent = agent_state(state.agent)
    statistics = state.observations.state_dict()
    tensors["observations.mean"] = statistics["mean"]
    tensors["observations.var"] = statistics["var"]
    return tensors, {
        "round": state.round,
        "settings": state.settings,
        "space": state.space.tree(),
        "agent": agent,
        "observations": statistics["count"],
        "rewards": state.rewards.state_dict(),
        "detector": state.detector.state_dict(),
        "escalation": state.escalation.state_dict(),
        "gradients": state.gradients.state_dict(),
        "best": None if state.best is None else asdict(state.best),
    }


def unpack(tensors: Mapping[str, Tensor], meta: Mapping[str, Any]) -> TrainState:
    """The inverse of `pack`; raises ConfigError if the content is not a valid state."""
    for name, tensor in tensors.items():
        if not tensor.isfinite().all():
            raise ConfigError(f"{name} has values that are not finite")
    try:
        space = Space.from_tree(meta["space"])
        agent = agent_from_state(tensors, meta["agent"])
        sizes = (space.observation_dim, space.num_slots, len(space.blueprints), space.kind)
        own = agent.network.config
        if sizes != (own.observation_dim, own.num_slots, own.num_blueprints, own.kind):
            raise ConfigError("the sizes of the policy's network do not match its observations")
        state = TrainState(
            settings=dict(meta["settings"]),
            space=space,
            agent=agent,
            observations=space.new_normalizer(),
            rewards=RewardNormalizer(),
            round=int(meta["round"]),
        )
        mean, var = tensors["observations.mean"], tensors["observations.var"]
        state.observations.load_state_dict(
            {"mean": mean, "var": var, "count": meta["observations"]}
        )
        state.rewards.load_state_dict(meta["rewards"])
        state.detector.load_state_dict(meta["detector"])
        state.escalation.load_state_dict(meta["escalation"])
        state.gradients.load_state_dict(meta["gradients"])
        if meta.get("best") is not None:
            state.best = BestPolicy(int(meta["best"]["round"]), float(meta["best"]["score"]))
    except (KeyError, TypeError, AttributeError, ValueError, OverflowError) as error:
        raise ConfigError(f"this is not the state of a training run: {error}") from error
    return state


def agent_state(agent: PPOAgent) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The complete state of an agent.

    Tensors are `network.<parameter>` and `optimizer.<moment>.<parameter>`; the dictionary has the
    settings of the network and of PPO, and the number of updates.
    """
    tensors = {}
    for name, parameter in agent.network.named_parameters():
        tensors[f"network.{name}"] = parameter.detach()
        for key, value in agent.optimizer.state[parameter].items():
            tensors[f"optimizer.{key}.{name}"] = value
    meta = {
        "network": asdict(agent.network.config),
        "ppo": asdict(agent.config),
        "update_count": agent.update_count,
    }
    copies = (tensor.contiguous() for tensor in to_host(list(tensors.values())))
    return dict(zip(tensors, copies, strict=True)), meta


def on(agent: PPOAgent, device: torch.device | str) -> PPOAgent:
    """The agent on another device; itself if it is there."""
    if torch.device(device) == agent.device:
        return agent
    return agent_from_state(*agent_state(agent), device)


def agent_from_state(
    tensors: Mapping[str, Tensor], meta: Mapping[str, Any], device: torch.device | str = "cpu"
) -> PPOAgent:
    """The agent with this `agent_state`; raises ConfigError if tensors do not fit the settings."""
    network = new_network(NetworkConfig(**meta["network"]))
    agent = PPOAgent(network, PPOConfig(**meta["ppo"]), device)
    parameters = dict(network.named_parameters())
    saved = {n.removeprefix("network."): t for n, t in tensors.items() if n.startswith("network.")}
    if saved.keys() != parameters.keys():
        odd = sorted(saved.keys() ^ parameters.keys())
        raise ConfigError(f"saved parameters do not match the network: {', '.join(odd)}")
    for name, parameter in parameters.items():
        if saved[name].shape != parameter.shape:
            raise ConfigError(
                f"the saved {name} is {list(saved[name].shape)}, "
                f"the network's is {list(parameter.shape)}"
            )
    with torch.no_grad():
        for name, parameter in parameters.items():
            parameter.copy_(saved[name])
    for full_name, tensor in tensors.items():
        if full_name.startswith("optimizer."):
            _, key, name = full_name.split(".", 2)
            agent.optimizer.state[parameters[name]][key] = tensor.to(agent.device).clone()
    agent.update_count = int(meta["update_count"])
    return agent
