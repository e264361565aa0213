"""Losses, the optimizer and its parameter groups, gradient norms, torch.compile."""

import logging
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from esper.leyline import HEAD_NAMES, ConfigError, constants
from esper.simic.agent.config import PPOConfig
from esper.simic.agent.network import FactoredRecurrentActorCritic, Parts


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


logger = logging.getLogger(__name__)


def parameter_groups(network: FactoredRecurrentActorCritic) -> dict[str, list[nn.Parameter]]:
    """Every parameter once: the shared trunk, the policy heads, the critic's head."""
    critic = list(network.value_head.parameters())
    actor = [p for name in HEAD_NAMES for p in network.head(name).parameters()]
    heads = {id(p) for p in (*critic, *actor)}
    trunk = [p for p in network.parameters() if id(p) not in heads]
    return {"trunk": trunk, "actor": actor, "critic": critic}


def make_optimizer(network: FactoredRecurrentActorCritic, config: PPOConfig) -> torch.optim.AdamW:
    """AdamW that decays the critic's head only; without decay it is Adam."""
    return torch.optim.AdamW(
        [
            {"params": group, "weight_decay": config.weight_decay if name == "critic" else 0.0}
            for name, group in parameter_groups(network).items()
        ],
        lr=config.learning_rate,
        eps=constants.ADAM_EPSILON,
        fused=True,
    )


def keep_gradients(network: FactoredRecurrentActorCritic, group: str) -> None:
    """Drop the gradients of all parameters outside `group`, so that no step moves them."""
    for name, parameters in parameter_groups(network).items():
        if name != group:
            for parameter in parameters:
                parameter.grad = None


def clip_gradients(
    network: FactoredRecurrentActorCritic, max_norm: float, separately: bool
) -> Tensor:
    """Clip in place, all together or trunk, actor and critic apart; returns the norm before.

    Gradients whose norm is not finite stay as they are, so that telemetry can name them.
    """
    if not separately:
        return _clip(list(network.parameters()), max_norm)
    norms = [_clip(group, max_norm) for group in parameter_groups(network).values()]
    return torch.stack(norms).norm()


def _clip(parameters: list[nn.Parameter], max_norm: float) -> Tensor:
    norm = gradient_norm(parameters)
    nn.utils.clip_grads_with_norm_(parameters, max_norm, norm.where(norm.isfinite(), 0.0))
    return norm


def compiled_parts(network: FactoredRecurrentActorCritic, backend: str | None) -> Parts:
    """What a network computes before and after its LSTM, each as one graph without breaks."""
    if backend is None:
        return network.parts
    return Parts(*(compiled_or_eager(each, backend) for each in vars(network.parts).values()))


def compiled_or_eager(function: Callable[..., Any], backend: str) -> Callable[..., Any]:
    """`function` compiled with dynamic shapes; if that fails it warns and runs eagerly."""
    # Imported here because the import takes a second.
    from torch._dynamo.exc import InvalidBackend, TorchDynamoException

    try:
        compiled = torch.compile(function, backend=backend, dynamic=True, fullgraph=True)
    except InvalidBackend as error:
        raise ConfigError(f"compile_backend {backend!r} is not known to torch") from error
    failed = False

    def call(*args: Any) -> Any:
        nonlocal failed
        if not failed:
            try:
                return compiled(*args)
            except TorchDynamoException as error:
                failed = True
                logger.warning(
                    "torch.compile with backend %r failed for %s, running eagerly: %s",
                    backend,
                    function.__name__,
                    error,
                )
        return function(*args)

    return call


def gradient_norm(parameters: Iterable[nn.Parameter]) -> Tensor:
    return nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None])
