"""A categorical distribution over the legal actions only."""

import math

import torch
from torch import Tensor

from esper.leyline import InvalidStateMachineError
from esper.leyline.constants import MASKED_LOGIT_VALUE


class MaskedCategorical:
    """Categorical over `logits` [..., n] restricted to where `mask` [..., n] is True.

    `logits` are then log-probs; illegal ones are a large negative number that half precision can
    hold, so that their probability is exactly 0, and they get no gradient. `validate` switches the
    checks, which wait for the device: an all-illegal row raises InvalidStateMachineError, a
    non-finite logit ValueError.
    """

    def __init__(self, logits: Tensor, mask: Tensor, *, validate: bool = True) -> None:
        if logits.shape != mask.shape:
            raise ValueError(
                f"logits {tuple(logits.shape)} and mask {tuple(mask.shape)} differ in shape"
            )
        # A check waits for the device and would break a compiled graph: see `check_drawn`.
        if validate and not torch.compiler.is_compiling():
            _check(logits, mask)
        self.mask = mask
        illegal = ~mask
        # The finite fill comes after the softmax: legal logits below it would lose to it.
        log_probs = logits.masked_fill(illegal, -math.inf).log_softmax(dim=-1)
        self.logits = log_probs.masked_fill(illegal, MASKED_LOGIT_VALUE)

    @property
    def probs(self) -> Tensor:
        return self.logits.exp()

    def sample(self, generator: torch.Generator | None = None) -> Tensor:
        flat = self.probs.float().reshape(-1, self.mask.shape[-1])
        return torch.multinomial(flat, 1, generator=generator).view(self.logits.shape[:-1])

    def icdf(self, uniforms: Tensor) -> Tensor:
        """The action for each uniform number in [0, 1), computed in its type: a draw that is a
        function of its noise."""
        exact = uniforms.dtype
        cumulative = self.logits.to(exact).exp().cumsum(dim=-1)
        # Below 1 by more than rounding, or the last legal action could be stepped over.
        most = 1.0 - (1e-12 if exact == torch.float64 else 1e-6)
        target = uniforms.clamp(max=most).unsqueeze(-1) * cumulative[..., -1:]
        return (cumulative <= target).sum(dim=-1)

    def mode(self) -> Tensor:
        return self.logits.argmax(dim=-1)

    def log_prob(self, action: Tensor) -> Tensor:
        return self.logits.gather(-1, action.unsqueeze(-1)).squeeze(-1)

    def entropy(self) -> Tensor:
        """Entropy over its maximum, in [0, 1]; exactly 0, gradient too, for one legal action."""
        legal = self.mask.sum(dim=-1)
        nats = -(self.probs * self.logits).sum(dim=-1)
        choice = legal > 1
        maximum = torch.where(choice, legal, math.e).to(nats.dtype).log()
        return torch.where(choice, nats / maximum, torch.zeros_like(nats))


def check_drawn(log_probs: Tensor) -> None:
    """The checks of `MaskedCategorical`, from the log-probs [..., heads] of drawn actions, for
    distributions in compiled code."""
    if log_probs.numel() and log_probs.amin() > MASKED_LOGIT_VALUE / 2:
        return
    if log_probs.isnan().any():
        raise ValueError(f"log-probs must be finite: {int(log_probs.isnan().sum())} NaN")
    rows = (log_probs <= MASKED_LOGIT_VALUE / 2).any(dim=-1)
    raise InvalidStateMachineError(
        f"{int(rows.sum())} of {rows.numel()} rows have no legal action; WAIT should always be one"
    )


def _check(logits: Tensor, mask: Tensor) -> None:
    legal = mask.any(dim=-1)
    if not legal.all():
        raise InvalidStateMachineError(
            f"{int((~legal).sum())} of {legal.numel()} rows have no legal action; "
            "WAIT should always be one"
        )
    # One reduction instead of isfinite().all(); NaN fails the comparison as well.
    if logits.numel() and not logits.detach().abs().amax() < math.inf:
        raise ValueError(
            f"logits must be finite: {int(logits.isnan().sum())} NaN, "
            f"{int(logits.isinf().sum())} infinite of {logits.numel()}"
        )
