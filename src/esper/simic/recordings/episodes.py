"""Recorded episodes: observations, masks, actions and rewards, for learning from them.

They are in the file `episodes.safetensors` of a run directory, or in its folder `episodes` with one
file per round: arrays as tensors, the rest as JSON in the header. Files are checked when they are
read, and no code in them is run.
"""

import json
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file
from torch import Tensor

from esper.leyline import BLUEPRINT, HEAD_RELEVANCE, OP, ActionMasks, ConfigError, RoundRecorder
from esper.simic.agent.rollout import Step, VectorEnv
from esper.simic.agent.types import MaskTensors
from esper.simic.training.config import TrainingConfig
from esper.simic.training.env_specs import ShardSpec, Space, env_batch_size, host_numbers
from esper.simic.training.round_log import RoundLog
from esper.simic.training.shard import Shard
from esper.tamiyo.policy.set_features import SetLayout
from esper.tamiyo.situation import Controller
from esper.tolaria.data.splits import DataSplits
from esper.tolaria.engine.run import act
from esper.tolaria.families.base import Family
from esper.tolaria.tasks import Task

FILE, FOLDER = "episodes.safetensors", "episodes"
FORMAT_VERSION = 3
MASKS = ("op", "slot", "blueprint", "blend")  # in the order of ActionMasks and MaskTensors
_HEADER = "esper_episodes"


@dataclass(frozen=True)
class Episodes:
    """N episodes of at most T steps; row n has `lengths[n]` steps and then padding.

    observations  float32 [N, T + 1, D], raw; row t is before step t, the last after the end
    op_masks, slot_masks, blueprint_masks, blend_masks   bool [N, T, ...], as in ActionMasks
    actions       int64 [N, T, 4], in the order of HEAD_NAMES
    rewards       float64 [N, T], raw
    lengths       int64 [N]
    hosts         int64 [N], equal for hosts of one member of a family, or of one key of a task
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
    hosts: np.ndarray

    def __len__(self) -> int:
        return len(self.lengths)

    @property
    def valid(self) -> np.ndarray:
        """bool [N, T]: False in padding."""
        return np.arange(self.actions.shape[1]) < self.lengths[:, None]

    @property
    def returns(self) -> np.ndarray:
        """float64 [N]: undiscounted sums of rewards."""
        return np.where(self.valid, self.rewards, 0.0).sum(axis=1)

    def masks(self) -> MaskTensors:
        """Masks [N, T, ...]; in padding everything is legal, so that distributions exist there."""
        padding = ~torch.from_numpy(self.valid)
        arrays = (getattr(self, f"{name}_masks") for name in MASKS)
        tensors = [torch.from_numpy(np.ascontiguousarray(array)) for array in arrays]
        return MaskTensors(
            *(t | padding.reshape(*padding.shape, *[1] * (t.dim() - 2)) for t in tensors)
        )

    def rows(self, rows: np.ndarray) -> "Episodes":
        """The chosen episodes."""
        return replace(self, **{name: getattr(self, name)[rows] for name in _ARRAYS})


_ARRAYS = tuple(f.name for f in fields(Episodes) if f.name != "space")


def acted_on(episodes: Episodes) -> Tensor:
    """float32 [steps, D]: the observations before all steps."""
    return torch.from_numpy(episodes.observations[:, :-1][episodes.valid])


def join(episodes: Sequence[Episodes]) -> Episodes:
    """All episodes in one object, padded to the longest. Raises ConfigError if there are none or
    their spaces differ."""
    if not episodes:
        raise ConfigError("there are no episodes to learn from")
    space = episodes[0].space
    if any(each.space != space for each in episodes):
        raise ConfigError(
            "these episodes are of different kinds: their observations, slots or blueprints differ"
        )
    steps = max(each.actions.shape[1] for each in episodes)

    def padded(each: Episodes, name: str) -> np.ndarray:
        array, missing = getattr(each, name), steps - each.actions.shape[1]
        return np.pad(array, [(0, missing if axis == 1 else 0) for axis in range(array.ndim)])

    return Episodes(
        space, **{name: np.concatenate([padded(e, name) for e in episodes]) for name in _ARRAYS}
    )


def convert_episodes(episodes: Episodes, space: Space) -> Episodes:
    """The episodes as a policy of `space` over sets observes them: slots and blueprints that their
    hosts did not have are absent. Raises ConfigError if `space` lacks any that they had."""
    own = episodes.space
    if own == space:
        return episodes
    fits = own.num_slots <= space.num_slots and set(own.blueprints) <= set(space.blueprints)
    if own.kind != "set" or space.kind != "set" or not fits:
        raise ConfigError(
            f"the policy has other slots or blueprints ({_summary(space)}) than the episodes "
            f"({_summary(own)}); use a policy over sets that has all of the latter"
        )
    positions = np.array([space.blueprints.index(name) for name in own.blueprints])
    absent = (0, space.num_slots - own.num_slots)

    def widened(array: np.ndarray) -> np.ndarray:
        """[N, T, S, B, ...] with every slot and blueprint at its position in `space`."""
        shape = (*array.shape[:2], space.num_slots, len(space.blueprints), *array.shape[4:])
        wide = np.zeros(shape, dtype=array.dtype)
        wide[:, :, : own.num_slots, positions] = array
        return wide

    layout = SetLayout(own.num_slots, len(own.blueprints))
    split = layout.split(torch.from_numpy(episodes.observations))
    run, slots, candidates = (block.numpy() for block in split)
    blocks = (run, np.pad(slots, [(0, 0), (0, 0), absent, (0, 0)]), widened(candidates))
    actions = episodes.actions.copy()
    chosen = HEAD_RELEVANCE[actions[..., OP]][..., BLUEPRINT]
    actions[chosen, BLUEPRINT] = positions[actions[chosen, BLUEPRINT]]
    return replace(
        episodes,
        space=space,
        observations=np.concatenate([b.reshape(*b.shape[:2], -1) for b in blocks], axis=-1),
        slot_masks=np.pad(episodes.slot_masks, [(0, 0), (0, 0), (0, 0), absent]),
        blueprint_masks=widened(episodes.blueprint_masks),
        actions=actions,
    )


def _summary(space: Space) -> str:
    return f"{space.num_slots} slots and {', '.join(space.blueprints)}, {space.kind}"


def save_episodes(run: Path, episodes: Episodes, round_: int | None = None) -> Path:
    """Write the episodes of one round, or all episodes, into a run directory. The file is replaced
    as a whole."""
    path = run / FILE if round_ is None else run / FOLDER / f"round-{round_:06}.safetensors"
    header = {"version": FORMAT_VERSION, **episodes.space.tree()}
    unfinished = path.with_name(path.name + ".unfinished")
    arrays = {name: np.ascontiguousarray(getattr(episodes, name)) for name in _ARRAYS}
    try:
        path.parent.mkdir(exist_ok=True)
        save_file(arrays, unfinished, metadata={_HEADER: json.dumps(header)})
        os.replace(unfinished, path)
    except (OSError, SafetensorError) as error:
        unfinished.unlink(missing_ok=True)
        raise ConfigError(
            f"{path} could not be written: {getattr(error, 'strerror', None) or error}"
        ) from error
    return path


def load_episodes(run: str | Path) -> Episodes:
    """Read the episodes of a run directory. Raises ConfigError for a damaged file, arrays that do
    not fit together, or an illegal action."""
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
    if not isinstance(header, dict) or header.get("version") != FORMAT_VERSION:
        raise ConfigError(
            f"{path} does not hold episodes in format {FORMAT_VERSION}; record them with this "
            "version of Esper"
        )
    try:
        space = Space.from_tree(header)
    except (ConfigError, KeyError, TypeError, ValueError) as error:
        raise ConfigError(f"{path} has no valid description of its episodes: {error}") from error
    unexpected = sorted(set(arrays) ^ set(_ARRAYS))
    if unexpected:
        raise ConfigError(f"{path} has other arrays than episodes have: {', '.join(unexpected)}")
    episodes = Episodes(space, **arrays)
    _check(path, episodes)
    return episodes


def _check(path: Path, episodes: Episodes) -> None:
    space = episodes.space
    if episodes.actions.ndim != 3 or len(episodes.actions) == 0:
        raise ConfigError(f"{path} holds no episodes")
    n, steps = episodes.actions.shape[:2]
    slots, blueprints, blends, ops = choices = space.choices
    expected: dict[str, tuple[tuple[int, ...], type]] = {
        "observations": ((n, steps + 1, space.observation_dim), np.float32),
        "op_masks": ((n, steps, ops), np.bool_),
        "slot_masks": ((n, steps, ops, slots), np.bool_),
        "blueprint_masks": ((n, steps, slots, blueprints), np.bool_),
        "blend_masks": ((n, steps, blends), np.bool_),
        "actions": ((n, steps, len(choices)), np.int64),
        "rewards": ((n, steps), np.float64),
        "lengths": ((n,), np.int64),
        "hosts": ((n,), np.int64),
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
    valid = episodes.valid
    actions = episodes.actions[valid]
    masks = ActionMasks(*(getattr(episodes, f"{name}_masks")[valid] for name in MASKS))
    if not ((actions >= 0) & (actions < choices)).all() or not masks.allows(actions).all():
        raise ConfigError(f"{path} holds an action that was not legal")


class RecordingEnv:
    """A wrapper of a `VectorEnv` that remembers each round. With a folder `run` it writes a round
    when the last episode ends, in place of an earlier attempt at the same round."""

    def __init__(
        self,
        env: VectorEnv,
        space: Space,
        config: TrainingConfig,
        family: Family | None = None,
        run: Path | None = None,
    ) -> None:
        self.env, self.num_envs, self.groups = env, env.num_envs, env.groups
        self.space, self.config, self.family, self.run = space, config, family, run

    def reset(self, round_: int) -> tuple[np.ndarray, ActionMasks]:
        observations, masks = self.env.reset(round_)
        self.round, self.lengths = round_, np.zeros(self.num_envs, dtype=np.int64)
        self.running = np.ones(self.num_envs, dtype=bool)
        self.observations, self.masks = [observations], [masks]
        self.actions: list[np.ndarray] = []
        self.rewards: list[np.ndarray] = []
        return observations, masks

    def step(self, actions: np.ndarray) -> Step:
        observations, masks, rewards, terminated, truncated = self.env.step(actions)
        self.lengths += self.running
        self.observations.append(observations)
        self.masks.append(masks)
        self.actions.append(actions.copy())
        self.rewards.append(np.where(self.running, rewards, 0.0))
        self.running = self.running & ~(terminated | truncated)
        if self.run is not None and not self.running.any():
            save_episodes(self.run, self.episodes(), self.round)
        return observations, masks, rewards, terminated, truncated

    def episodes(self) -> Episodes:
        """One episode of each environment in this round, after at least one step."""
        masks = self.masks[:-1]
        return Episodes(
            self.space,
            observations=np.stack(self.observations, axis=1),
            **{f"{n}_masks": np.stack([getattr(m, n) for m in masks], axis=1) for n in MASKS},
            actions=np.stack(self.actions, axis=1),
            rewards=np.stack(self.rewards, axis=1).astype(np.float64),
            lengths=self.lengths,
            hosts=host_numbers(self.config, self.family, self.round, self.groups),
        )


def record_episodes(
    config: TrainingConfig,
    task: Task,
    data: DataSplits,
    controller: Controller,
    *,
    episodes: int,
    family: Family | None = None,
    recorder: RoundRecorder | None = None,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Episodes:
    """Let the controller play the episodes of a training run with these settings. Hosts of one
    architecture make a round. `recorder` gets the records of all rounds. The observations are those
    of a policy with `config.network.kind`. The result is a function of the arguments."""
    size, log, recorded = env_batch_size(config, family), RoundLog(recorder), []
    for round_, first in enumerate(range(0, episodes, size)):
        progress(first, episodes)
        envs = tuple(range(min(size, episodes - first)))
        spec = ShardSpec(config, task, data, envs, family=family, controller=controller.name)
        shard = Shard(spec, log)
        log.begin(round_, detailed=False)
        env = RecordingEnv(shard, shard.space, config, family)
        env.reset(round_)
        (batch,) = shard.batches
        # A host that breaks while it warms up has no episode.
        playable = np.flatnonzero(batch.env.running)
        controller.reset(shard.num_envs)
        while batch.env.running.any():
            env.step(act(batch.env, controller))
        if len(playable):
            recorded.append(env.episodes().rows(playable))
    progress(episodes, episodes)
    return join(recorded)
