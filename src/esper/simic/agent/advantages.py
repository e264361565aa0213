"""Advantages over time (GAE), relative to a group, and per head of the action."""

import torch
from torch import Tensor

from esper.leyline import HEAD_NAMES, HEAD_RELEVANCE, ConfigError
from esper.leyline.constants import ADVANTAGE_STD_FLOOR

_RELEVANCE = torch.from_numpy(HEAD_RELEVANCE.copy())


@torch.compiler.disable
def compute_gae(
    rewards: Tensor,
    values: Tensor,
    bootstrap_values: Tensor,
    terminated: Tensor,
    truncated: Tensor,
    gamma: float,
    lam: float,
) -> tuple[Tensor, Tensor]:
    """Generalised advantage estimates and returns (Schulman et al., 2016), all arrays [N, T].

    `values[n, t]` is V of the state before step t. `bootstrap_values[n, t]` is V of the state after
    it, read only where the step was truncated and in the last column.
    """
    shapes = {x.shape for x in (rewards, values, bootstrap_values, terminated, truncated)}
    if len(shapes) != 1 or rewards.dim() != 2:
        raise ValueError(f"GAE needs arrays of one shape [N, T], got {sorted(map(tuple, shapes))}")
    advantages = torch.zeros_like(rewards)
    if rewards.shape[1] == 0:
        return advantages, advantages.clone()
    next_values = torch.cat([values[:, 1:], bootstrap_values[:, -1:]], dim=1)
    next_values = torch.where(truncated, bootstrap_values, next_values)
    # where() instead of products, because unread values may be NaN.
    delta = rewards + gamma * torch.where(terminated, 0.0, next_values) - values
    ended = terminated | truncated
    running = torch.zeros_like(rewards[:, 0])
    for t in reversed(range(rewards.shape[1])):
        running = delta[:, t] + gamma * lam * torch.where(ended[:, t], 0.0, running)
        advantages[:, t] = running
    return advantages, advantages + values


def leave_one_out(advantages: Tensor, groups: Tensor, valid: Tensor) -> Tensor:
    """Advantages [N, T] minus the mean advantage of the rest of the group at the same step.

    Rows with the same number in `groups` [N] differ only in their actions, so the baseline removes
    the effect of the host. It does not depend on the row itself, so the policy gradient stays
    unbiased. A row that has ended counts as 0.

    Raises ConfigError if a row is alone in its group.
    """
    check_groups(groups)
    same = (groups[:, None] == groups).to(advantages.dtype)
    own = torch.where(valid, advantages, 0.0)
    others = (same @ own - own) / (same.sum(dim=1, keepdim=True) - 1.0)
    return torch.where(valid, own - others, 0.0)


def check_groups(groups: Tensor) -> None:
    """Raise ConfigError if a row is alone in its group."""
    _, sizes = groups.unique(return_counts=True)
    if (sizes < 2).any():
        raise ConfigError(
            "ppo.group_baseline needs at least 2 environments in every group; set group to 2 or "
            "more, or leave it out"
        )


def normalize_advantages(advantages: Tensor, valid: Tensor) -> Tensor:
    """Zero mean and unit standard deviation over the valid steps of all rows; 0 elsewhere.

    The deviation has a floor, so that almost constant advantages stay small. It is all zeros for
    fewer than two valid steps.
    """
    chosen = advantages[valid]
    if chosen.numel() < 2:
        return torch.zeros_like(advantages)
    scaled = (advantages - chosen.mean()) / chosen.std().clamp(min=ADVANTAGE_STD_FLOOR)
    return torch.where(valid, scaled, 0.0)


def head_relevance(ops: Tensor) -> Tensor:
    """bool[..., 4]: the heads (in the order of HEAD_NAMES) that each op uses."""
    return _RELEVANCE.to(ops.device)[ops]


def compute_per_head_advantages(advantages: Tensor, ops: Tensor) -> dict[str, Tensor]:
    """The advantage of each head: that of the step if the op uses the head, else 0.

    `advantages` and `ops` have one shape, [B] or [B, T]. A head that the op ignores cannot have
    caused the outcome; leaving it out keeps the policy gradient unbiased and lowers its variance.
    """
    if advantages.shape != ops.shape:
        raise ValueError(
            f"advantages {tuple(advantages.shape)} and ops {tuple(ops.shape)} differ in shape"
        )
    relevant = head_relevance(ops)
    per_head = {
        name: torch.where(relevant[..., index], advantages, 0.0)
        for index, name in enumerate(HEAD_NAMES)
    }
    # Every op uses the op head: no copy is needed.
    return per_head | {"op": advantages}
