"""Checkpoints of a training run: sealed folders; the newest intact one is read.

checkpoints/round-000012/
    manifest.json        format version, and the SHA-256 of the other two files
    state.json           everything but tensors
    tensors.safetensors  tensors

Loading a checkpoint runs no code from it.
"""

import hashlib
import json
import logging
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load, save

from esper.leyline import ConfigError
from esper.leyline.files import (
    MANIFEST,
    MAX_WEIGHTS,
    DamagedCheckpointError,
    clear_unfinished,
    discard,
    from_json,
    parse_json,
    read_bytes,
    read_sealed,
    sealed_series,
    to_json,
    write_sealed,
)
from esper.leyline.policy_card import (
    CARD,
    UNMEASURED,
    WEIGHTS,
    PolicyCard,
    check_policy_name,
    read_card,
)
from esper.simic.training.state import TrainState, pack, unpack

VERSION, OLDEST = 4, 3
Meta = dict[str, Any]

# The defaults of version 4: what a run of version 3 was played with.
_SETTINGS_OF_4 = {
    "anomalies.entropy_collapse": 0.1,
    "anomalies.entropy_low": 0.3,
    "anomalies.kl_spike": 0.1,
    "anomalies.kl_extreme": 0.5,
    "anomalies.drift": 0.5,
    "anomalies.value_phases": [[0.1, -0.5], [0.25, -0.2], [0.75, 0.0], [1.0, 0.1]],
    "anomalies.patience": 2,
    "ppo.validate_masks": True,
    "growth.snapshots": "host",
}


def _from_3(meta: Mapping[str, Any]) -> Meta:
    settings = {**meta["settings"], **_SETTINGS_OF_4}
    # A run with two modes cannot be continued: it keeps the setting, which no config has any more.
    if settings.get("ab_reward_mode") is None:
        settings.pop("ab_reward_mode", None)
    # The first one is that of `reward_mode`, which policies need not name.
    return {**meta, "settings": settings, "rewards": next(iter(meta["rewards"].values()), {})}


def upgraded(meta: Mapping[str, Any], version: int) -> Meta:
    """The state's dictionary of an older version, as one of VERSION. Raises ConfigError if it is
    not a state of its version."""
    try:
        return dict(meta) if version == VERSION else _from_3(meta)
    except (KeyError, TypeError, AttributeError) as error:
        raise ConfigError(f"this is not a state of version {version}: {error!r}") from error


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
    """Write weights and card, without the optimizer, and return the card with the checksum. Raises
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


def read_policy(folder: Path) -> TrainState:
    """A state with the policy and no optimizer state. Raises ConfigError if the folder is damaged,
    of another format or not a policy."""
    path, wanted = folder / WEIGHTS, read_card(folder).sha256
    data = read_bytes(path, MAX_WEIGHTS)
    if hashlib.sha256(data).hexdigest() != wanted:
        raise ConfigError(
            f"{path} is damaged: its checksum is not that of {CARD}; export the policy again, or "
            "get another copy of the folder"
        )
    try:
        # What Esper wrote into the header of the safetensors file.
        header = parse_json(data[8 : 8 + int.from_bytes(data[:8], "little")])
        meta = parse_json(header.get("__metadata__", {}).get(HEADER, "null"))
        tensors = load(data)
    except (SafetensorError, ValueError, AttributeError) as error:
        raise ConfigError(f"{path} is damaged, or not a policy: {error}") from error
    if not isinstance(meta, dict) or meta.get("format") not in STATE_OF:
        raise ConfigError(f"{path} is not a policy that this version of Esper can read")
    try:
        return unpack(tensors, upgraded(meta, STATE_OF[meta["format"]]))
    except ConfigError as error:
        raise ConfigError(f"{path} cannot be used: {error}") from error


logger = logging.getLogger(__name__)

FOLDER = "checkpoints"
STATE, TENSORS = "state.json", "tensors.safetensors"
KEPT = 2


@dataclass(frozen=True)
class Checkpoint:
    """A state, and the size of each file of the run at that time, in bytes."""

    path: Path
    state: TrainState
    files: dict[str, int]


def save_checkpoint(run: Path, state: TrainState, files: Mapping[str, int]) -> Path:
    """Write the checkpoint before round `state.round`, and remove all but it and the one before.
    Raises ConfigError, and keeps earlier ones, if it cannot be written."""
    final = run / FOLDER / f"round-{state.round:06d}"
    tensors, meta = pack(state)
    contents = {STATE: to_json({**meta, "files": dict(files)}), TENSORS: save(tensors)}
    clear_unfinished(final.parent)
    try:
        write_sealed(final, contents, VERSION)
    except OSError as error:
        left = _checkpoints(run)
        kept = f"{left[0].name} is intact" if left else "there is no earlier one"
        raise ConfigError(
            f"the checkpoint {final.name} could not be written: {error.strerror or error}; "
            f"{kept}; free disk space and continue with --resume {run}"
        ) from error
    for old in _checkpoints(run)[KEPT:]:
        discard(old)
    return final


def load_checkpoint(run: Path) -> Checkpoint:
    """The newest intact checkpoint of a run; logs a warning for each newer one that is damaged."""
    candidates = _checkpoints(run)
    if not candidates:
        raise ConfigError(f"{run} holds no checkpoint; name the folder of a training run")
    refused = []
    for path in candidates:
        try:
            return read_checkpoint(path, run)
        except DamagedCheckpointError as error:
            logger.warning("%s; the one before it is used", error)
            refused.append(str(error))
    raise DamagedCheckpointError(f"no checkpoint of {run} is intact: {'; '.join(refused)}")


def read_checkpoint(path: Path, run: Path | None = None) -> Checkpoint:
    """One checkpoint, upgraded if an older version of Esper has written it. Raises ConfigError if
    it is damaged, of a format that cannot be read, or not a checkpoint."""
    contents = read_sealed(path, (STATE, TENSORS), VERSION, run, OLDEST)
    meta = from_json(path / STATE, contents[STATE])
    version = from_json(path / MANIFEST, contents[MANIFEST])["format"]
    try:
        state = unpack(load(contents[TENSORS]), upgraded(meta, version))
    except (SafetensorError, ConfigError) as error:
        raise DamagedCheckpointError(f"{path} cannot be used: {error}") from error
    sizes = meta.get("files")
    if not isinstance(sizes, dict) or not all(
        isinstance(size, int) and size >= 0 for size in sizes.values()
    ):
        raise DamagedCheckpointError(f"{path} lacks the sizes of the files of its run")
    return Checkpoint(path, state, dict(sizes))


def is_run(path: str | Path) -> bool:
    """Whether the folder holds checkpoints or is one."""
    path = Path(path)
    return (path / MANIFEST).is_file() or bool(_checkpoints(path))


def load_state(path: str | Path) -> TrainState:
    """The newest state of a run, the state in one of its checkpoints, or an exported policy."""
    path = Path(path)
    if (path / WEIGHTS).is_file():
        return read_policy(path)
    if (path / MANIFEST).is_file():
        return read_checkpoint(path).state
    return load_checkpoint(path).state


def _checkpoints(run: Path) -> list[Path]:
    """Finished checkpoints, newest first."""
    return sealed_series(run / FOLDER, "round")
