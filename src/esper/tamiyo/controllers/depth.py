"""The controller of growth in depth: when the next blocks come."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import ArrayLike

from esper.leyline import OP, SLOT, ConfigError, LifecycleOp, shortened
from esper.leyline.depth import AUTO, Depth
from esper.tamiyo.situation import Situation, wait

SPAN = 4.0  # the compute of the run must have grown so many times at the present depth
WINDOW = 2.0  # the slope is taken where the compute grew so many times last
POINTS = 8  # losses that must be known there
FALL = 0.12  # a smaller fall of the loss, as a share of it, is worth giving up


def grow_now(losses: ArrayLike, computes: ArrayLike, cost_ratio: float) -> bool:
    """Whether the time to deepen the network has come.

    `losses[i]` is the loss after the i-th epoch at the present depth, on data that the network does
    not train on, and `computes[i]` what the *whole* run had cost at its end. `cost_ratio` is what a
    step costs at the next depth, divided by what it costs now.

    For the same compute a deeper network takes fewer steps: it gives up the fall of the loss over
    log2(cost_ratio) doublings. It may come if that is less than FALL of the loss, and if the
    compute has grown SPAN times since the network grew last: depth then follows the square root of
    the compute. The slope is a least-squares line of the last losses over log2(compute).
    """
    known = np.isfinite(losses)
    loss, spent = np.asarray(losses)[known], np.asarray(computes)[known]
    if not len(loss) or spent[-1] < SPAN * spent[0]:
        return False
    recent = spent >= spent[-1] / WINDOW
    if recent.sum() < POINTS:
        return False
    slope, _ = np.polyfit(np.log2(spent[recent]), loss[recent], 1)
    return bool(-slope * np.log2(cost_ratio) < FALL * loss[recent].mean())


def depth_named(when: str, **settings: Any) -> Depth:
    """A Depth from the name of its controller, `depth:WHEN`, or from WHEN alone. Raises
    ConfigError."""
    share = when.removeprefix("depth").removeprefix(":") or AUTO
    try:
        return Depth(when=AUTO if share == AUTO else float(share), **settings)
    except ValueError:
        raise ConfigError(
            f"no controller 'depth:{shortened(share)}'; give depth:auto, or the share of the run "
            "after which the network grows, such as depth:0.25"
        ) from None


class DepthController:
    """Grows at shares of the run, or by `grow_now`, and keeps blocks as soon as that is legal.

    losses, spent   [T, E]: validation losses and the compute spent, in multiply-adds per example
    grown           [E]: the epochs that were done when blocks came last
    """

    def __init__(self, shares: Sequence[float] | None) -> None:
        self.shares = shares
        when = "auto" if shares is None else ",".join(f"{share:g}" for share in shares)
        self.name = f"depth:{when}"
        self.reset(0)

    @staticmethod
    def of(depth: Depth) -> "DepthController":
        return DepthController(depth.shares)

    @staticmethod
    def named(when: str = AUTO) -> "DepthController":
        """`when` is "auto" or a share of the run."""
        return DepthController.of(depth_named(when))

    def reset(self, n_envs: int) -> None:
        self.losses, self.spent = np.zeros((2, 0, n_envs))
        self.grown = np.zeros(n_envs, dtype=np.int64)

    def state_dict(self) -> dict[str, Any]:
        return {name: torch.from_numpy(array) for name, array in self._arrays().items()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for name in self._arrays():
            setattr(self, name, state[name].numpy().copy())

    def _arrays(self) -> dict[str, np.ndarray]:
        return {name: value for name, value in vars(self).items() if isinstance(value, np.ndarray)}

    def act(self, situation: Situation) -> np.ndarray:
        actions, table, masks = wait(situation.n_envs), situation.table, situation.masks
        self._note(situation)
        for op, where in (
            (LifecycleOp.GERMINATE, self._due(situation)),
            (LifecycleOp.FOSSILIZE, masks.op[:, LifecycleOp.FOSSILIZE]),
        ):
            where = where & masks.op[:, op]
            actions[where, OP] = op
            actions[where, SLOT] = masks.slot[where, op].argmax(axis=1)
        # In order: an earlier group that was removed comes again before later ones.
        comes = actions[:, OP] == LifecycleOp.GERMINATE
        first = (~table.holds_seed).argmax(axis=1)
        actions[comes & (actions[:, SLOT] != first)] = wait(1)
        self.grown[actions[:, OP] == LifecycleOp.GERMINATE] = len(self.losses)
        return actions

    def _note(self, situation: Situation) -> None:
        macs = _macs(situation)
        before = self.spent[-1] if len(self.spent) else np.zeros(situation.n_envs)
        self.spent = np.concatenate([self.spent, (before + macs)[None]])
        self.losses = np.concatenate([self.losses, situation.signals.val_loss[None]])

    def _due(self, situation: Situation) -> np.ndarray:
        """bool[E]"""
        table = situation.table
        if self.shares is not None:
            held = table.holds_seed.sum(axis=1)
            coming = np.array([*self.shares, np.inf])[np.minimum(held, len(self.shares))]
            return np.asarray(1.0 - situation.left >= coming - 1e-9)
        assert situation.facts is not None
        following = (~table.holds_seed).argmax(axis=1)
        ratios = 1.0 + situation.facts.seed_macs[following, 0] / _macs(situation)
        return np.array(
            [
                grow_now(self.losses[since:, env], self.spent[since:, env], ratios[env])
                for env, since in enumerate(self.grown.tolist())
            ],
            dtype=bool,
        )


def _macs(situation: Situation) -> np.ndarray:
    """[E]: multiply-adds per example of the present networks."""
    assert situation.facts is not None
    return np.asarray(situation.facts.host_macs + situation.table.active_macs.sum(axis=1))
