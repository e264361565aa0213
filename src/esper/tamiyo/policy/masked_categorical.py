"""A categorical distribution over the legal actions only."""

import math

import torch
from torch import Tensor

from esper.leyline import InvalidStateMachineError
from esper.leyline.constants import MASKED_LOGIT_VALUE


class MaskedCategorical:
    """Categorical over `logits` [..., n] restricted to where `mask` [..., n] is True.

    Illegal logits are filled with a large negative number that half precision can hold; they get
    no probability that matters and no gradient. `validate` (class or instance) switches the checks,
    which wait for the device: an all-illegal row raises InvalidStateMachineError, a non-finite
    logit ValueError.
    """

    validate = True

    def __init__(self, logits: Tensor, mask: Tensor) -> None:
        if logits.shape != mask.shape:
            raise ValueError(
                f"logits {tuple(logits.shape)} and mask {tuple(mask.shape)} differ in shape"
            )
        if self.validate:
            _check(logits, mask)
        self.mask = mask
        # Relative to the best legal logit, or legal logits below the fill would lose to it.
        best = logits.detach().masked_fill(~mask, -math.inf).amax(dim=-1, keepdim=True)
        self.logits = (logits - best).masked_fill(~mask, MASKED_LOGIT_VALUE).log_softmax(dim=-1)

    @property
    def probs(self) -> Tensor:
        return self.logits.exp()

    def sample(self, generator: torch.Generator | None = None) -> Tensor:
        flat = self.probs.float().masked_fill(~self.mask, 0.0).reshape(-1, self.mask.shape[-1])
        return torch.multinomial(flat, 1, generator=generator).view(self.logits.shape[:-1])

    def icdf(self, uniforms: Tensor) -> Tensor:
        """The action for each uniform number in [0, 1): a draw that is a function of its noise."""
        cumulative = self.probs.double().masked_fill(~self.mask, 0.0).cumsum(dim=-1)
        # Just below the total, or rounding could step over the last legal action.
        below_total = torch.nextafter(cumulative[..., -1], torch.zeros_like(uniforms))
        target = torch.minimum(uniforms * cumulative[..., -1], below_total)
        return (cumulative <= target.unsqueeze(-1)).sum(dim=-1)

    def mode(self) -> Tensor:
        return self.logits.argmax(dim=-1)

    def log_prob(self, action: Tensor) -> Tensor:
        return self.logits.gather(-1, action.unsqueeze(-1)).squeeze(-1)

    def entropy(self) -> Tensor:
        """Entropy over its maximum, in [0, 1]; exactly 0, gradient too, for one legal action."""
        legal = self.mask.sum(dim=-1)
        nats = -(self.probs * self.logits).masked_fill(~self.mask, 0.0).sum(dim=-1)
        choice = legal > 1
        maximum = torch.where(choice, legal, math.e).to(nats.dtype).log()
        return torch.where(choice, nats / maximum, torch.zeros_like(nats))


@torch.compiler.disable
def _check(logits: Tensor, mask: Tensor) -> None:
    empty = ~mask.any(dim=-1)
    if empty.any():
        raise InvalidStateMachineError(
            f"{int(empty.sum())} of {empty.numel()} rows have no legal action; "
            "WAIT should always be one"
        )
    if not torch.isfinite(logits).all():
        raise ValueError(
            f"logits must be finite: {int(logits.isnan().sum())} NaN, "
            f"{int(logits.isinf().sum())} infinite of {logits.numel()}"
        )
