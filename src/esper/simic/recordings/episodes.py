"""Recorded episodes, for learning from them: what was seen, allowed, done, and what came of it.

A file `episodes.safetensors` in a run directory, or the folder `episodes` with one file per round:
arrays as tensors, the rest as JSON in the header. Nothing in them is code, and what is read is
checked before it is used.
"""

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file
from torch import Tensor

from esper.leyline import (
    BLEND_NAMES,
    BLUEPRINT,
    HEAD_NAMES,
    HEAD_RELEVANCE,
    NUM_OPS,
    OP,
    ActionMasks,
    ConfigError,
)
from esper.simic.agent.types import MaskTensors
from esper.simic.training.space import Space
from esper.tamiyo.policy.set_features import SetLayout

FILE, FOLDER = "episodes.safetensors", "episodes"
FORMAT_VERSION = 2
_HEADER = "esper_episodes"


@dataclass(frozen=True)
class Episodes:
    """N episodes of at most T steps; row n has `lengths[n]` of them, what follows is padding.

    observations  float32 [N, T + 1, D], raw; step t is decided on row t, the last is the end
    op_masks, slot_masks, blueprint_masks, blend_masks   bool [N, T, ...], as in ActionMasks
    actions       int64 [N, T, 4], in the order of HEAD_NAMES
    rewards       float64 [N, T], raw
    """

    space: Space
    observations: np.ndarray
    op_masks: np.ndarray
    slot_masks: np.ndarray
    blueprint_masks: np.ndarray
    blend_masks: np.ndarray
    actions: np.ndarray
    rewards: np.ndarray
    lengths: np.ndarray

    def __len__(self) -> int:
        return len(self.lengths)

    @property
    def valid(self) -> np.ndarray:
        """bool [N, T]: where a step was taken."""
        return np.arange(self.actions.shape[1]) < self.lengths[:, None]

    @property
    def returns(self) -> np.ndarray:
        """float64 [N]: undiscounted sums of rewards."""
        return np.where(self.valid, self.rewards, 0.0).sum(axis=1)

    def masks(self) -> MaskTensors:
        """Masks [N, T, ...]; everything is legal in padding, which has to be a distribution too."""
        padding = ~torch.from_numpy(self.valid)
        arrays = (self.op_masks, self.slot_masks, self.blueprint_masks, self.blend_masks)
        tensors = [torch.from_numpy(np.ascontiguousarray(array)) for array in arrays]
        return MaskTensors(
            *(t | padding.reshape(*padding.shape, *[1] * (t.dim() - 2)) for t in tensors)
        )

    def rows(self, rows: np.ndarray) -> "Episodes":
        """The chosen episodes."""
        return replace(self, **{name: getattr(self, name)[rows] for name in _ARRAYS})


_ARRAYS = tuple(f.name for f in fields(Episodes) if f.name != "space")


def decided_on(episodes: Episodes) -> Tensor:
    """float32 [steps, D]: the observations of all steps that were taken."""
    return torch.from_numpy(episodes.observations[:, :-1][episodes.valid])


def join(parts: Sequence[Episodes]) -> Episodes:
    """All episodes in one, padded to the longest; raises ConfigError if they do not go together."""
    if not parts:
        raise ConfigError("there are no episodes to learn from")
    if any(part.space != parts[0].space for part in parts):
        raise ConfigError(
            "these episodes are of different kinds: their observations, slots or blueprints differ"
        )
    longest = max(part.actions.shape[1] for part in parts)
    padded = [_padded(part, longest) for part in parts]
    arrays = {name: np.concatenate([part[name] for part in padded]) for name in _ARRAYS}
    return Episodes(parts[0].space, **arrays)


def shown_in(episodes: Episodes, space: Space) -> Episodes:
    """The same episodes as a policy of `space` sees them: to a network over sets a host of fewer
    slots, or with fewer blueprints to choose from, is one whose others are absent. Raises
    ConfigError if something of them has no place there."""
    own = episodes.space
    if own == space:
        return episodes
    _check_room(own, space)
    place = np.array([space.blueprints.index(name) for name in own.blueprints])
    absent = (0, space.num_slots - own.num_slots)

    def spread(array: np.ndarray) -> np.ndarray:
        """[N, T, S, B, ...] with every slot and blueprint at its place in `space`."""
        shape = (*array.shape[:2], space.num_slots, len(space.blueprints), *array.shape[4:])
        wide = np.zeros(shape, dtype=array.dtype)
        wide[:, :, : own.num_slots, place] = array
        return wide

    layout = SetLayout(own.num_slots, len(own.blueprints))
    seen = layout.split(torch.from_numpy(episodes.observations))
    run, slots, candidates = (block.numpy() for block in seen)
    blocks = (run, np.pad(slots, [(0, 0), (0, 0), absent, (0, 0)]), spread(candidates))
    actions = episodes.actions.copy()
    chosen = HEAD_RELEVANCE[actions[..., OP]][..., BLUEPRINT]
    actions[chosen, BLUEPRINT] = place[actions[chosen, BLUEPRINT]]
    return replace(
        episodes,
        space=space,
        observations=np.concatenate([b.reshape(*b.shape[:2], -1) for b in blocks], axis=-1),
        slot_masks=np.pad(episodes.slot_masks, [(0, 0), (0, 0), (0, 0), absent]),
        blueprint_masks=spread(episodes.blueprint_masks),
        actions=actions,
    )


def _check_room(own: Space, space: Space) -> None:
    lacking = sorted(set(own.blueprints) - set(space.blueprints))
    too_many = own.num_slots > space.num_slots
    if own.kind != "set" or space.kind != "set" or lacking or too_many:
        raise ConfigError(
            f"the episodes are of other slots or blueprints: {_of(own)}; to be learnt from for "
            f"{_of(space)}. A network over sets takes them for hosts that have all of these"
        )


def _of(space: Space) -> str:
    return f"{space.num_slots} slots and {', '.join(space.blueprints)} ({space.kind})"


def _padded(part: Episodes, steps: int) -> dict[str, np.ndarray]:
    missing = steps - part.actions.shape[1]
    arrays = {}
    for name in _ARRAYS:
        array = getattr(part, name)
        width = [(0, 0)] * array.ndim
        if array.ndim > 1:
            width[1] = (0, missing)
        arrays[name] = np.pad(array, width)
    return arrays


# --- files ---------------------------------------------------------------------------------------


def save_episodes(run: Path, episodes: Episodes, round_: int | None = None) -> Path:
    """Write them into a run directory, as those of one round or as all that there are; whoever
    looks sees the old file or the new, never a part."""
    path = run / FILE if round_ is None else run / FOLDER / f"round-{round_:06}.safetensors"
    header = {"version": FORMAT_VERSION, **episodes.space.tree()}
    unfinished = path.with_name(path.name + ".unfinished")
    arrays = {name: np.ascontiguousarray(getattr(episodes, name)) for name in _ARRAYS}
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        save_file(arrays, unfinished, metadata={_HEADER: json.dumps(header)})
        os.replace(unfinished, path)
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror}") from error
    return path


def load_episodes(run: str | Path) -> Episodes:
    """Read the episodes of a run directory; raises ConfigError, in a sentence, if they do not hold
    up: a damaged file, arrays that do not fit together, an illegal action."""
    whole, rounds = Path(run) / FILE, sorted((Path(run) / FOLDER).glob("round-*.safetensors"))
    if not whole.is_file() and not rounds:
        raise ConfigError(
            f"{run} holds no recorded episodes; record some with: esper train record --out {run}"
        )
    return join([_load(path) for path in ([whole] if whole.is_file() else rounds)])


def _load(path: Path) -> Episodes:
    try:
        with safe_open(path, framework="np") as file:
            header = json.loads((file.metadata() or {}).get(_HEADER, "null"))
            arrays = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except (SafetensorError, ValueError) as error:
        raise ConfigError(f"{path} is damaged: {error}") from error
    episodes = Episodes(_space(path, header), **_checked(path, arrays))
    _check(path, episodes)
    return episodes


def _space(path: Path, header: Any) -> Space:
    if not isinstance(header, dict) or header.get("version") != FORMAT_VERSION:
        raise ConfigError(f"{path} does not hold episodes in format {FORMAT_VERSION}")
    try:
        return Space.from_tree(header)
    except (ConfigError, KeyError, TypeError, ValueError) as error:
        raise ConfigError(f"{path} does not say what its episodes are of: {error}") from error


def _checked(path: Path, arrays: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    odd = sorted(set(arrays) ^ set(_ARRAYS))
    if odd:
        raise ConfigError(f"{path} has other arrays than episodes have: {', '.join(odd)}")
    return arrays


def _check(path: Path, episodes: Episodes) -> None:
    space = episodes.space
    if episodes.actions.ndim != 3 or len(episodes.actions) == 0:
        raise ConfigError(f"{path} holds no episodes")
    n, steps = episodes.actions.shape[:2]
    slots, blueprints = space.num_slots, len(space.blueprints)
    expected: dict[str, tuple[tuple[int, ...], type]] = {
        "observations": ((n, steps + 1, space.observation_dim), np.float32),
        "op_masks": ((n, steps, NUM_OPS), np.bool_),
        "slot_masks": ((n, steps, NUM_OPS, slots), np.bool_),
        "blueprint_masks": ((n, steps, slots, blueprints), np.bool_),
        "blend_masks": ((n, steps, len(BLEND_NAMES)), np.bool_),
        "actions": ((n, steps, len(HEAD_NAMES)), np.int64),
        "rewards": ((n, steps), np.float64),
        "lengths": ((n,), np.int64),
    }
    for name, (shape, dtype) in expected.items():
        array = getattr(episodes, name)
        if array.shape != shape or array.dtype != dtype:
            raise ConfigError(
                f"{name} in {path} is {array.dtype} {list(array.shape)}, "
                f"it must be {np.dtype(dtype)} {list(shape)}"
            )
        if array.dtype.kind == "f" and not np.isfinite(array).all():
            raise ConfigError(f"{name} in {path} holds NaN or infinity")
    if not ((episodes.lengths >= 1) & (episodes.lengths <= steps)).all():
        raise ConfigError(f"{path} holds an episode that is longer than its arrays, or empty")
    _check_actions(path, episodes)


def _check_actions(path: Path, episodes: Episodes) -> None:
    valid = episodes.valid
    actions = episodes.actions[valid]
    sizes = (
        episodes.space.num_slots,
        len(episodes.space.blueprints),
        len(BLEND_NAMES),
        NUM_OPS,
    )
    masks = ActionMasks(
        episodes.op_masks[valid],
        episodes.slot_masks[valid],
        episodes.blueprint_masks[valid],
        episodes.blend_masks[valid],
    )
    if not ((actions >= 0) & (actions < sizes)).all() or not masks.allows(actions).all():
        raise ConfigError(f"{path} holds an action that was not legal")
