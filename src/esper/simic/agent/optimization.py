"""The optimiser and its parameter groups, gradient norms, torch.compile."""

import logging
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from esper.leyline import HEAD_NAMES, ConfigError, constants
from esper.simic.agent.config import PPOConfig
from esper.simic.agent.network import FactoredRecurrentActorCritic, Parts

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
