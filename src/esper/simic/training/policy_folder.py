"""Folders with an exported policy: its weights, and a card with their checksum."""

import hashlib
import json
import shutil
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load, save

from esper.leyline import ConfigError
from esper.leyline.limits import MAX_WEIGHTS, parse_json, read_bytes
from esper.leyline.policy_card import (
    CARD,
    UNMEASURED,
    WEIGHTS,
    PolicyCard,
    check_policy_name,
    read_card,
)
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


def write_policy(folder: Path, state: TrainState, card: PolicyCard) -> PolicyCard:
    """Write weights and card, without the optimiser, and return the card with the checksum. Raises
    ConfigError if the folder exists, OSError without leaving it if it cannot be written."""
    if folder.exists():
        raise ConfigError(f"{folder} exists already; remove it, or choose another name or folder")
    files = policy_files(state, card)
    folder.mkdir(parents=True)
    try:
        for name, content in files.items():
            (folder / name).write_bytes(content)
    except OSError:
        shutil.rmtree(folder, ignore_errors=True)
        raise
    return read_card(folder)


def policy_files(state: TrainState, card: PolicyCard) -> dict[str, bytes]:
    """The files of a policy folder by name; the checksum of the card is that of the weights."""
    check_policy_name(card.name)
    tensors, meta = pack(state)
    weights = {name: each for name, each in tensors.items() if not name.startswith("optimizer.")}
    meta |= {"format": VERSION, "settings": _public(state.settings)}
    data = save(weights, {HEADER: json.dumps(meta)})
    card = replace(card, sha256=hashlib.sha256(data).hexdigest())
    return {WEIGHTS: data, CARD: card.as_toml().encode()}


def _public(settings: Mapping[str, Any]) -> dict[str, Any]:
    """The settings without the path to a folder of the training machine."""
    start = settings.get("warm_start")
    return {**settings, **({} if start is None else {"warm_start": Path(start).name})}


def is_policy(folder: Path) -> bool:
    return (folder / WEIGHTS).is_file()


def read_policy(folder: Path) -> TrainState:
    """A state with the policy and no optimiser state. Raises ConfigError if the folder is damaged,
    of another format or not a policy."""
    path, wanted = folder / WEIGHTS, read_card(folder).sha256
    data = read_bytes(path, MAX_WEIGHTS)
    if hashlib.sha256(data).hexdigest() != wanted:
        raise ConfigError(
            f"{path} is damaged: its checksum is not that of {CARD}; export the policy again, or "
            "get another copy of the folder"
        )
    try:
        meta, tensors = _header(data), load(data)
    except (SafetensorError, ValueError, AttributeError) as error:
        raise ConfigError(f"{path} is damaged, or not a policy: {error}") from error
    if not isinstance(meta, dict) or meta.get("format") not in STATE_OF:
        raise ConfigError(f"{path} is not a policy that this version of Esper can read")
    try:
        return unpack(tensors, upgraded(meta, STATE_OF[meta["format"]]))
    except ConfigError as error:
        raise ConfigError(f"{path} cannot be used: {error}") from error


def _header(data: bytes) -> Any:
    """What Esper wrote into the header of a safetensors file; None without it."""
    header = parse_json(data[8 : 8 + int.from_bytes(data[:8], "little")])
    return parse_json(header.get("__metadata__", {}).get(HEADER, "null"))
