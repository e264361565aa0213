"""The controller of growth in depth: when the next blocks come."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from esper.leyline import OP, SLOT, ConfigError, LifecycleOp, shortened
from esper.leyline.depth import AUTO, Depth
from esper.tamiyo.situation import Situation, wait

# By how much the loss must still fall, per doubling of the compute spent, for the present depth to
# be enough; relative to the loss.
LEAST_FALL = 0.03
# Epochs at one depth before its loss curve can be judged.
LEAST_EPOCHS = 4


def grow_now(losses: np.ndarray, spent: np.ndarray) -> bool:
    """Whether more blocks would pay: the loss [T] hardly falls any more with the compute spent [T],
    both since the blocks that came last."""
    known = np.isfinite(losses)
    losses, spent = losses[known], spent[known]
    if len(losses) < LEAST_EPOCHS:
        return False
    recent = spent >= spent[-1] / 2.0
    if recent.sum() < LEAST_EPOCHS:
        recent[-LEAST_EPOCHS:] = True
    fall = -np.polyfit(np.log2(spent[recent]), losses[recent], 1)[0]
    return bool(fall < LEAST_FALL * losses[recent].mean())


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
        self.grown[comes] = len(self.losses)
        return actions

    def _note(self, situation: Situation) -> None:
        assert situation.facts is not None
        macs = situation.facts.host_macs + situation.table.active_macs.sum(axis=1)
        before = self.spent[-1] if len(self.spent) else np.zeros(situation.n_envs)
        self.spent = np.concatenate([self.spent, (before + macs)[None]])
        self.losses = np.concatenate([self.losses, situation.signals.val_loss[None]])

    def _due(self, situation: Situation) -> np.ndarray:
        """bool[E]"""
        if self.shares is None:
            return np.array(
                [
                    grow_now(self.losses[since:, env], self.spent[since:, env])
                    for env, since in enumerate(self.grown.tolist())
                ],
                dtype=bool,
            )
        held = situation.table.holds_seed.sum(axis=1)
        coming = np.array([*self.shares, np.inf])[np.minimum(held, len(self.shares))]
        return np.asarray(1.0 - situation.left >= coming - 1e-9)
