"""The terms of the PPO loss, as functions of tensors."""

import torch
from torch import Tensor
from torch.nn import functional as F


def masked_mean(values: Tensor, mask: Tensor) -> Tensor:
    """Mean over axis 0 where `mask`; 0 for a column without any."""
    total = torch.where(mask, values, 0.0).sum(dim=0)
    return total / mask.sum(dim=0).clamp(min=1)


def clipped_surrogate(ratio: Tensor, advantages: Tensor, clip: float) -> Tensor:
    """Elementwise pessimistic objective of PPO (Schulman et al., 2017), to be maximised."""
    if ratio.shape != advantages.shape:
        raise ValueError(
            f"ratios {tuple(ratio.shape)} and advantages {tuple(advantages.shape)} differ in shape"
        )
    return torch.min(ratio * advantages, ratio.clamp(1.0 - clip, 1.0 + clip) * advantages)


def k3_kl(log_ratio: Tensor) -> Tensor:
    """Elementwise estimate of KL(old || new) from old samples: (e^d - 1) - d, never negative."""
    return torch.expm1(log_ratio) - log_ratio


def joint_kl(log_ratio: Tensor, relevant: Tensor) -> Tensor:
    """KL between the joint policies: sum over heads of their share of steps times their KL.

    `log_ratio` and `relevant` are [steps, heads]. Heads are drawn one after the other, so their
    KLs add up (chain rule), and a head that was not drawn adds nothing.
    """
    shares = relevant.float().mean(dim=0)
    return (shares * masked_mean(k3_kl(log_ratio), relevant)).sum()


def value_errors(
    values: Tensor,
    returns: Tensor,
    old_values: Tensor,
    clip: float | None = None,
    huber_delta: float | None = None,
) -> Tensor:
    """Elementwise value loss: squared error, or Huber when `huber_delta` is given.

    With `clip`, the larger of the error and the error of a prediction kept within `clip` of the
    old one. `clip` is in units of return, unlike the clip of the ratio.
    """
    if not values.shape == returns.shape == old_values.shape:
        raise ValueError(
            f"values {tuple(values.shape)}, returns {tuple(returns.shape)} and old values "
            f"{tuple(old_values.shape)} differ in shape"
        )

    def error(prediction: Tensor) -> Tensor:
        if huber_delta is None:
            return (prediction - returns).square()
        return F.huber_loss(prediction, returns, reduction="none", delta=huber_delta)

    if clip is None:
        return error(values)
    return torch.max(error(values), error(old_values + (values - old_values).clamp(-clip, clip)))


def explained_variance(values: Tensor, returns: Tensor) -> float:
    """1 - Var(returns - values) / Var(returns); 0 when the returns do not vary."""
    variance = returns.var(correction=0)
    if returns.numel() < 2 or variance <= 1e-8:
        return 0.0
    return float(1.0 - (returns - values).var(correction=0) / variance)
