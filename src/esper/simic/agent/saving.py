"""An agent as named tensors and a dictionary for JSON, for checkpoints."""

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor

from esper.growth.devices import to_host
from esper.leyline import ConfigError
from esper.simic.agent.config import PPOConfig
from esper.simic.agent.network import NetworkConfig
from esper.simic.agent.ppo import PPOAgent
from esper.simic.agent.set_network import new_network


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
    _check_shapes(tensors, parameters)
    with torch.no_grad():
        for name, parameter in parameters.items():
            parameter.copy_(tensors[f"network.{name}"])
    for full_name, tensor in tensors.items():
        owner, key, name = full_name.split(".", 2)
        if owner == "optimizer":
            agent.optimizer.state[parameters[name]][key] = tensor.to(agent.device).clone()
    agent.update_count = int(meta["update_count"])
    return agent


def _check_shapes(
    tensors: Mapping[str, Tensor], parameters: Mapping[str, torch.nn.Parameter]
) -> None:
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
