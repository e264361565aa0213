"""The decisions and heads whose probability ratios explode or collapse."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from esper.growth.devices import wide_dtype
from esper.leyline import HEAD_NAMES
from esper.leyline import constants as c

MOST_EXAMPLES = 32


@dataclass(frozen=True)
class RatioExplosionDiagnostic:
    """Ratios outside the limits, over the heads that were relevant in each step.

    worst_head      the head with the ratio furthest from 1 (in log), None without any step
    worst_ratio     that ratio
    outliers        number per head, in the order of HEAD_NAMES
    examples        rows of metrics for the worst outliers, at most MOST_EXAMPLES, worst first
    log_prob_change_mean, log_prob_change_max   of |new - old| over relevant heads
    """

    worst_head: str | None
    worst_ratio: float | None
    outliers: dict[str, int]
    examples: list[dict[str, Any]]
    log_prob_change_mean: float | None
    log_prob_change_max: float | None

    @staticmethod
    @torch.compiler.disable
    @torch.no_grad()
    def from_batch(
        old_log_probs: Tensor,
        new_log_probs: Tensor,
        relevant: Tensor,
        actions: Tensor,
        max_ratio: float = c.RATIO_EXPLOSION_THRESHOLD,
        min_ratio: float = c.RATIO_COLLAPSE_THRESHOLD,
    ) -> "RatioExplosionDiagnostic":
        """All [N, heads]; `relevant` says which heads the op of each step uses."""
        if not old_log_probs.shape == new_log_probs.shape == relevant.shape == actions.shape:
            raise ValueError(
                f"old {list(old_log_probs.shape)}, new {list(new_log_probs.shape)}, relevant "
                f"{list(relevant.shape)} and actions {list(actions.shape)} must have one shape"
            )
        exact = wide_dtype(new_log_probs.device.type)
        change = (new_log_probs - old_log_probs).to(exact)
        packed = torch.stack([change, relevant.to(exact), actions.to(exact)]).cpu().double()
        change, used, chosen = packed[0], packed[1].bool(), packed[2].long()
        if not used.any():
            none = dict.fromkeys(HEAD_NAMES, 0)
            return RatioExplosionDiagnostic(None, None, none, [], None, None)
        ratio = change.exp()
        # Not 'ratio > max or < min': a NaN is an outlier too.
        outside = used & ~((ratio <= max_ratio) & (ratio >= min_ratio))
        distance = torch.where(used, change.abs().nan_to_num(nan=torch.inf), -1.0)
        step, head = divmod(int(distance.argmax()), len(HEAD_NAMES))
        order = distance[outside].argsort(descending=True, stable=True)[:MOST_EXAMPLES]
        examples = zip(
            outside.nonzero()[order].tolist(),
            ratio[outside][order].tolist(),
            chosen[outside][order].tolist(),
            strict=True,
        )
        size = change[used].abs()
        return RatioExplosionDiagnostic(
            worst_head=HEAD_NAMES[head],
            worst_ratio=float(ratio[step, head]),
            outliers=dict(zip(HEAD_NAMES, outside.sum(dim=0).tolist(), strict=True)),
            examples=[
                {"index": index, "head": HEAD_NAMES[h], "ratio": value, "action": action}
                for (index, h), value, action in examples
            ],
            log_prob_change_mean=float(size.mean()),
            log_prob_change_max=float(size.max()),
        )

    def flat(self) -> dict[str, Any]:
        """Columns of one row of metrics, without the examples."""
        return {
            "worst_head": self.worst_head,
            "worst_ratio": self.worst_ratio,
            **{f"{head}_outliers": count for head, count in self.outliers.items()},
            "log_prob_change_mean": self.log_prob_change_mean,
            "log_prob_change_max": self.log_prob_change_max,
        }
