"""One slot of a live network: the seed in it and how it is blended into the host.

While TRAINING a seed learns in isolation: it reads detached features, and the network's output is
the host's own, bit for bit, although gradients reach the seed as if it were blended in. From
BLENDING on the output is `h + alpha * delta(h)` and gradients pass through the seed like through
any layer.
"""

from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from esper.growth.blueprints import count_params
from esper.growth.blueprints.modules import nearly_zero_
from esper.leyline import IS_BLENDED, IS_FULL, InjectionSpec, SeedStage


class _Isolate(torch.autograd.Function):
    """Value of the host, gradient for both: a NaN in the seed cannot touch the host's output."""

    @staticmethod
    def forward(ctx: Any, host: Tensor, seed: Tensor) -> Tensor:
        # A copy, because the host may change its own features in place further on.
        return host.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor]:
        return grads[0], grads[0]


def _safe_to_read(h: Tensor) -> Tensor:
    """`h`, or the same values as a leaf that asks for a gradient nobody uses.

    GroupNorm kills the process (torch 2.13) in the backward pass of channels-last features that
    need no gradient: those of a frozen host, and what an isolated seed reads. Strides tell, also
    for maps of one pixel, which count as contiguous.
    """
    if h.requires_grad or h.dim() != 4 or h.stride(1) != 1 or not torch.is_grad_enabled():
        return h
    return h.detach().requires_grad_()


class BlendValve(nn.Module):
    """A learned shift of alpha for each sample (or each position, where the target has them).

    For blending progress p it returns `p * (1 + (1 - p) * (2g - 1))`, which is within [0, 1], 0
    for p = 0 and 1 for p = 1 whatever its setting g: blending starts and ends smoothly.
    `feature_dims` and `target_dims` count dimensions with the batch.
    """

    def __init__(self, channels: int, feature_dims: int, target_dims: int) -> None:
        super().__init__()
        self.feature_dims = feature_dims
        self.target_dims = target_dims
        self.progress = 0.0
        self.net = nn.Sequential(
            nn.Linear(channels, max(1, channels // 4)),
            nn.GELU(),
            nearly_zero_(nn.Linear(max(1, channels // 4), 1)),
            nn.Sigmoid(),
        )

    def forward(self, h: Tensor) -> Tensor:
        """Alpha for the slot's features `h`, of a shape that broadcasts against the target."""
        if self.feature_dims == 4:
            h = h.mean(dim=(2, 3))
        elif self.feature_dims == 3 and self.target_dims == 2:
            h = h.mean(dim=1)
        setting = self.net(h)
        if self.target_dims == 4:
            setting = setting[:, :, None, None]
        return self.progress * (1.0 + (1.0 - self.progress) * (2.0 * setting - 1.0))


def valve_params(sites: list[InjectionSpec]) -> np.ndarray:
    """int[S]: parameters of the valve that a gated blend adds while it lasts."""
    with torch.device("meta"):
        return np.array([count_params(BlendValve(site.channels, 2, 2)) for site in sites])


class SeedSlot(nn.Module):
    """The seed of one slot, or none. `on_slot_output` and `on_host_output` are forward hooks.

    alpha   blending progress; what is applied on average is `applied_alpha`
    muted   while True the seed is taken out (alpha forced to 0), for counterfactuals
    measuring   while True the alphas of a gated blend are noted for `applied_alpha`
    """

    seed: nn.Module | None
    valve: BlendValve | None

    def __init__(self, site: InjectionSpec) -> None:
        super().__init__()
        self.site = site
        self.muted = False
        self.measuring = False
        self._features: list[Tensor] = []
        self.clear()

    def plant(
        self, seed: nn.Module, valve: BlendValve | None, blueprint: int, blend: int, *, branch: bool
    ) -> None:
        self.seed = seed
        self.valve = valve
        self.is_branch = branch
        self.blueprint, self.blend = blueprint, blend
        self.set_blend(SeedStage.GERMINATED, 0.0)

    def set_blend(self, stage: SeedStage, alpha: float) -> None:
        """A full blend needs no valve: it leaves when the ramp is over."""
        self.stage, self.alpha = stage, alpha
        if IS_FULL[stage]:
            self.valve = None
        if self.valve is not None:
            self.valve.progress = alpha

    def clear(self) -> None:
        self.seed = None
        self.valve = None
        self.is_branch = False
        self.blueprint = self.blend = -1
        self.stage = SeedStage.DORMANT
        self.alpha = 0.0
        self._applied_sum, self._applied_count = torch.zeros(()), 0
        self._features.clear()

    def applied_alpha(self) -> float:
        """Mean alpha of the blends measured since the last call; without any, the scheduled one.

        Waits for the device; call it once per pass over the data.
        """
        if self.valve is None or self._applied_count == 0:
            return self.alpha
        mean = float(self._applied_sum) / self._applied_count
        self._applied_sum, self._applied_count = torch.zeros(()), 0
        return mean

    def on_slot_output(self, module: nn.Module, args: Any, output: Any) -> Any:
        """Blend into the output of the slot's module; of a tuple, into its first element."""
        if self.muted or self.stage <= SeedStage.GERMINATED:
            return None
        h = output[0] if isinstance(output, tuple) else output
        if self.is_branch:
            self._features[:] = [h]
            return None
        blended = self._blend(h, h)
        return (blended, *output[1:]) if isinstance(output, tuple) else blended

    def on_host_output(self, module: nn.Module, args: Any, output: Tensor) -> Tensor | None:
        """Add the branch's path to the network's output."""
        if not self._features:
            return None
        return self._blend(self._features.pop(), output)

    def _blend(self, h: Tensor, target: Tensor) -> Tensor:
        assert self.seed is not None
        isolated = self.stage == SeedStage.TRAINING
        delta = self.seed(_safe_to_read(h.detach() if isolated else h))
        if isolated:
            return _Isolate.apply(target, delta)
        assert IS_BLENDED[self.stage]
        if self.valve is None:
            return target + self.alpha * delta if self.alpha != 1.0 else target + delta
        alpha = self.valve(h)
        if self.measuring:
            self._applied_sum = self._applied_sum.to(alpha.device) + alpha.detach().sum()
            self._applied_count += alpha.numel()
        return target + alpha * delta
