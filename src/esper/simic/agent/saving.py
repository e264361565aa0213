"""An agent as one file: tensors in safetensors, the rest as JSON in its header. No pickle."""

import json
import os
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from esper.leyline import ConfigError
from esper.simic.agent.config import PPOConfig
from esper.simic.agent.network import FactoredRecurrentActorCritic, NetworkConfig
from esper.simic.agent.ppo import PPOAgent

# 1: parameters and AdamW moments by parameter name; network, ppo and update_count as JSON.
FORMAT_VERSION = 1
_HEADER = "esper_agent"

State = tuple[dict[str, Tensor], dict[str, Any]]
# MIGRATIONS[v] turns the state of version v into that of version v + 1. To change the format,
# raise FORMAT_VERSION, add a line to the list above and an entry here.
MIGRATIONS: dict[int, Callable[[dict[str, Tensor], dict[str, Any]], State]] = {}


def agent_state(agent: PPOAgent) -> State:
    """Everything that makes the agent what it is: named tensors, and a dictionary for JSON."""
    tensors = {}
    for name, parameter in agent.network.named_parameters():
        tensors[f"network.{name}"] = parameter.detach()
        for key, value in agent.optimizer.state[parameter].items():
            tensors[f"optimizer.{key}.{name}"] = value
    meta = {
        "version": FORMAT_VERSION,
        "network": asdict(agent.network.config),
        "ppo": asdict(agent.config),
        "update_count": agent.update_count,
    }
    return {name: tensor.cpu().contiguous() for name, tensor in tensors.items()}, meta


def agent_from_state(
    tensors: dict[str, Tensor], meta: dict[str, Any], device: torch.device | str = "cpu"
) -> PPOAgent:
    """The agent of which `agent_state` was taken; refuses what does not fit, in one sentence."""
    tensors, meta = _current(tensors, meta)
    network = FactoredRecurrentActorCritic(NetworkConfig(**meta["network"]))
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


def _current(tensors: dict[str, Tensor], meta: dict[str, Any]) -> State:
    """Bring an older state up to date; refuse one from the future or without a way forward."""
    version = meta.get("version")
    if not isinstance(version, int) or version < 1:
        raise ConfigError(f"not an agent that this program saved: its version is {version!r}")
    if version > FORMAT_VERSION:
        raise ConfigError(
            f"this agent was saved in format {version}, this program reads up to "
            f"{FORMAT_VERSION}; use a newer version of esper"
        )
    for step in range(version, FORMAT_VERSION):
        tensors, meta = MIGRATIONS[step](tensors, meta)
    return tensors, meta


def _check_shapes(tensors: dict[str, Tensor], parameters: dict[str, torch.nn.Parameter]) -> None:
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


def save_agent(agent: PPOAgent, path: str | Path) -> None:
    """Write the agent to one file; whoever looks sees the old file or the new, never a part."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    tensors, meta = agent_state(agent)
    unfinished = path.with_name(path.name + ".unfinished")
    save_file(tensors, unfinished, metadata={_HEADER: json.dumps(meta)})
    os.replace(unfinished, path)


def load_agent(
    path: str | Path, device: torch.device | str = "cpu", expected: NetworkConfig | None = None
) -> PPOAgent:
    """Read an agent; with `expected`, refuse one whose inputs or choices are of other sizes."""
    try:
        with safe_open(path, framework="pt") as file:
            header = (file.metadata() or {}).get(_HEADER)
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except SafetensorError as error:
        raise ConfigError(f"{path} is not a safetensors file: {error}") from error
    if header is None:
        raise ConfigError(f"{path} holds tensors, but not an agent")
    agent = agent_from_state(tensors, json.loads(header), device)
    if expected is not None:
        for name in ("observation_dim", "num_slots", "num_blueprints", "num_blends"):
            has, wants = getattr(agent.network.config, name), getattr(expected, name)
            if has != wants:
                raise ConfigError(f"the agent in {path} has {name} {has}, this run has {wants}")
    return agent
