"""Folders with an exported policy: its weights and a card that describes it."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import save

from esper.leyline import ConfigError
from esper.leyline.policy_card import CARD, UNMEASURED, WEIGHTS, PolicyCard, check_policy_name
from esper.simic.training.state import TrainState, pack, unpack
from esper.simic.training.versions import VERSION, upgraded

HEADER = "esper"
# The versions of states by the format of the policies that hold them.
STATE_OF = {2: 3, VERSION: VERSION}


def card_of(state: TrainState, name: str, episodes: int | None = None) -> PolicyCard:
    """A card with what is known from the run; the author adds what has to be measured."""
    settings = _public(state.settings)
    where = settings.get("family") or f"task {settings.get('task')}"
    played = "an unknown number of" if episodes is None else f"{episodes:,}"
    learning = settings.get("learning")
    how = f"in {state.round} rounds" if learning is None else f"recorded, learned by {learning}"
    return PolicyCard(
        name=name,
        worth=UNMEASURED,
        trained_on=f"{where}: {played} episodes {how}, key {settings.get('key')}",
        evaluated=UNMEASURED,
        fails=UNMEASURED,
        parameters=sum(p.numel() for p in state.agent.network.parameters()),
        settings=settings,
    )


def write_policy(folder: Path, state: TrainState, card: PolicyCard) -> None:
    """Write weights and card, without the optimiser. Raises ConfigError if the folder exists."""
    if folder.exists():
        raise ConfigError(f"{folder} exists already; remove it, or choose another name or folder")
    files = policy_files(state, card)
    folder.mkdir(parents=True)
    for name, content in files.items():
        (folder / name).write_bytes(content)


def policy_files(state: TrainState, card: PolicyCard) -> dict[str, bytes]:
    """The files of a policy folder by name."""
    check_policy_name(card.name)
    tensors, meta = pack(state)
    weights = {name: each for name, each in tensors.items() if not name.startswith("optimizer.")}
    meta |= {"format": VERSION, "settings": _public(state.settings)}
    header = {HEADER: json.dumps(meta)}
    return {WEIGHTS: save(weights, header), CARD: card.as_toml().encode()}


def _public(settings: Mapping[str, Any]) -> dict[str, Any]:
    """The settings without the path to a folder of the training machine."""
    start = settings.get("warm_start")
    return {**settings, **({} if start is None else {"warm_start": Path(start).name})}


def is_policy(folder: Path) -> bool:
    return (folder / WEIGHTS).is_file()


def read_policy(folder: Path) -> TrainState:
    """A state with the policy and no optimiser state. Raises ConfigError if the folder is damaged,
    of another format or not a policy."""
    path = folder / WEIGHTS
    try:
        with safe_open(path, framework="pt") as file:
            meta = json.loads((file.metadata() or {}).get(HEADER, "null"))
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except (SafetensorError, ValueError) as error:
        raise ConfigError(f"{path} is damaged, or not a policy: {error}") from error
    if not isinstance(meta, dict) or meta.get("format") not in STATE_OF:
        raise ConfigError(f"{path} is not a policy that this version of Esper can read")
    try:
        return unpack(tensors, upgraded(meta, STATE_OF[meta["format"]]))
    except ConfigError as error:
        raise ConfigError(f"{path} cannot be used: {error}") from error
