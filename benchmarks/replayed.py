"""Hosts of which every candidate was played, as an environment that costs nothing.

    esper train record --family digits:trained --controller each --group 10 --episodes 1280 ...

leaves what a host looks like before its first decision and what each candidate came to, and waiting
too. `Replayed` lets a policy take that decision again and pays it what it came to then: one step,
real observations and real returns, thousands of episodes in a minute.
"""

from dataclasses import dataclass

import numpy as np

from esper.leyline import BLUEPRINT, OP, SLOT, ActionMasks, ConfigError, LifecycleOp, draw_key
from esper.simic.recordings.episodes import Episodes

MASKS = ("op", "slot", "blueprint", "blend")
HELD_OUT = 4  # one shape of so many is never learnt from


@dataclass(frozen=True)
class Table:
    """H hosts, S slots, B blueprints.

    seen     float32 [H, D]
    masks    of [H, ...]: waiting and what was played
    planted  float64 [H, S, B], returns; NaN where nothing was played
    waited   float64 [H]
    shapes   int[H], the same number for hosts of the same widths
    """

    seen: np.ndarray
    masks: ActionMasks
    planted: np.ndarray
    waited: np.ndarray
    shapes: np.ndarray

    def __len__(self) -> int:
        return len(self.seen)

    @staticmethod
    def of(episodes: Episodes) -> "Table":
        """Raises ConfigError if not every host has waited once."""
        starts, host = np.unique(episodes.observations[:, 0], axis=0, return_inverse=True)
        host = host.reshape(-1)
        space = episodes.space
        planted = np.full((len(starts), space.num_slots, len(space.blueprints)), np.nan)
        waited = np.full(len(starts), np.nan)
        action, returns = episodes.actions[:, 0], episodes.returns
        seeds = action[:, OP] == LifecycleOp.GERMINATE
        planted[host[seeds], action[seeds, SLOT], action[seeds, BLUEPRINT]] = returns[seeds]
        waited[host[~seeds]] = returns[~seeds]
        if np.isnan(waited).any():
            raise ConfigError("a host was never left alone; record with a larger --group")
        first = np.unique(host, return_index=True)[1]
        masks = ActionMasks(
            *(np.array(getattr(episodes, f"{name}_masks")[first, 0]) for name in MASKS)
        )
        widths = [n for n, (_, name) in enumerate(_names(episodes)) if name == "channels"]
        shapes = np.unique(starts[:, widths], axis=0, return_inverse=True)[1].reshape(-1)
        return Table(starts, _narrowed(masks, ~np.isnan(planted)), planted, waited, shapes)

    def rows(self, rows: np.ndarray) -> "Table":
        masks = ActionMasks(*(getattr(self.masks, name)[rows] for name in MASKS))
        return Table(
            self.seen[rows], masks, self.planted[rows], self.waited[rows], self.shapes[rows]
        )

    def split(self) -> tuple["Table", "Table"]:
        """(To learn from, held out), which share no shape."""
        out = self.shapes % HELD_OUT == 0
        return self.rows(np.flatnonzero(~out)), self.rows(np.flatnonzero(out))

    def returns(self, actions: np.ndarray) -> np.ndarray:
        """float64 [H] of one action [H, 4] on each host."""
        planted = self.planted[np.arange(len(self)), actions[:, SLOT], actions[:, BLUEPRINT]]
        return np.where(actions[:, OP] == LifecycleOp.GERMINATE, planted, self.waited)


def _names(episodes: Episodes) -> list[tuple[str, str]]:
    return episodes.space.names([f"slot {n}" for n in range(episodes.space.num_slots)])


def _narrowed(masks: ActionMasks, played: np.ndarray) -> ActionMasks:
    """Only what was played is legal, and of blends the first."""
    op, slot = np.zeros_like(masks.op), np.zeros_like(masks.slot)
    op[:, [LifecycleOp.WAIT, LifecycleOp.GERMINATE]] = True
    slot[:, LifecycleOp.WAIT] = True
    slot[:, LifecycleOp.GERMINATE] = played.any(axis=2)
    blend = np.zeros_like(masks.blend)
    blend[:, 0] = True
    return ActionMasks(op, slot, masks.blueprint & played, blend)


class Replayed:
    """A `VectorEnv` of one step; `group` environments have the same host."""

    def __init__(self, table: Table, envs: int, group: int, key: int) -> None:
        self.table, self.num_envs, self.key = table, envs, key
        self.groups = np.arange(envs) // group

    def reset(self, round_: int) -> tuple[np.ndarray, ActionMasks]:
        numbers = [draw_key(self.key, "replayed", round_, g) for g in self.groups.tolist()]
        self.hosts = self.table.rows(np.array([n % len(self.table) for n in numbers]))
        return self.hosts.seen, self.hosts.masks

    def step(
        self, actions: np.ndarray
    ) -> tuple[np.ndarray, ActionMasks, np.ndarray, np.ndarray, np.ndarray]:
        over = np.ones(self.num_envs, dtype=bool)
        return self.hosts.seen, self.hosts.masks, self.hosts.returns(actions), over, ~over
