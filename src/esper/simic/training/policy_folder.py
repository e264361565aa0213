"""A policy without the rest of its training, for others to use."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import save

from esper.leyline import ConfigError
from esper.leyline.policy_card import CARD, UNMEASURED, WEIGHTS, PolicyCard, check_policy_name
from esper.simic.training.state import TrainState, pack, unpack

FORMAT, HEADER = 2, "esper"


def card_of(state: TrainState, name: str, episodes: int | None = None) -> PolicyCard:
    """A card with what the run knows; what has to be measured is left to its author."""
    settings = _told(state.settings)
    where = settings.get("family") or f"task {settings.get('task')}"
    played = "an unknown number of" if episodes is None else f"{episodes:,}"
    return PolicyCard(
        name=name,
        worth=UNMEASURED,
        trained_on=f"{where}: {played} episodes in {state.round} rounds, key {settings.get('key')}",
        evaluated=UNMEASURED,
        fails=UNMEASURED,
        parameters=sum(p.numel() for p in state.agent.network.parameters()),
        settings=settings,
    )


def write_policy(folder: Path, state: TrainState, card: PolicyCard) -> None:
    """Weights and card, without optimiser. Raises ConfigError if there is something already."""
    if folder.exists():
        raise ConfigError(f"{folder} is there already; remove it, or choose another name or folder")
    files = policy_files(state, card)
    folder.mkdir(parents=True)
    for name, content in files.items():
        (folder / name).write_bytes(content)


def policy_files(state: TrainState, card: PolicyCard) -> dict[str, bytes]:
    """What the folder of a policy has in it, by name."""
    check_policy_name(card.name)
    tensors, meta = pack(state)
    weights = {name: each for name, each in tensors.items() if not name.startswith("optimizer.")}
    meta |= {"format": FORMAT, "settings": _told(state.settings)}
    header = {HEADER: json.dumps(meta)}
    return {WEIGHTS: save(weights, header), CARD: card.as_toml().encode()}


def _told(settings: Mapping[str, Any]) -> dict[str, Any]:
    """The settings without the way to a folder of the machine that trained it."""
    start = settings.get("warm_start")
    return {**settings, **({} if start is None else {"warm_start": Path(start).name})}


def is_policy(folder: Path) -> bool:
    return (folder / WEIGHTS).is_file()


def read_policy(folder: Path) -> TrainState:
    """A state with the policy in it and nothing else learnt. Raises ConfigError if it is damaged,
    foreign or too new."""
    path = folder / WEIGHTS
    try:
        with safe_open(path, framework="pt") as file:
            meta = json.loads((file.metadata() or {}).get(HEADER, "null"))
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except (SafetensorError, ValueError) as error:
        raise ConfigError(f"{path} is damaged, or not a policy: {error}") from error
    if not isinstance(meta, dict) or meta.get("format") != FORMAT:
        raise ConfigError(f"{path} is no policy that this version of Esper can read")
    try:
        return unpack(tensors, meta)
    except ConfigError as error:
        raise ConfigError(f"{path} cannot be used: {error}") from error
