"""Health of the hidden state of a recurrent policy."""

from dataclasses import dataclass

import torch
from torch import Tensor

from esper.leyline.constants import LSTM_MAX_NORM, LSTM_MIN_NORM


@dataclass(frozen=True)
class LSTMHealth:
    """Largest L2 norm of an environment, and largest absolute entry, of hidden and cell state."""

    h_norm: float
    c_norm: float
    h_max: float
    c_max: float
    unhealthy_envs: tuple[int, ...]

    def flat(self) -> dict[str, float]:
        """Columns of a row of metrics."""
        sizes = ("h_norm", "c_norm", "h_max", "c_max")
        row = {f"lstm_{name}": getattr(self, name) for name in sizes}
        return row | {"lstm_unhealthy_envs": len(self.unhealthy_envs)}


@torch.compiler.disable
@torch.no_grad()
def compute_lstm_health(hidden: tuple[Tensor, Tensor] | None) -> LSTMHealth | None:
    """For h and c of shape [layers, E, H]; None for None. One transfer from the device.

    An environment is healthy if both norms lie between LSTM_MIN_NORM and LSTM_MAX_NORM.
    """
    if hidden is None:
        return None
    both = torch.stack([state.detach().float() for state in hidden])
    if both.dim() != 4:
        raise ValueError(f"hidden states must be [layers, envs, size], got {list(both.shape[1:])}")
    norms = both.square().sum(dim=(1, 3)).sqrt()
    summary = torch.cat([norms.amax(dim=1), both.abs().amax(dim=(1, 2, 3)), norms.flatten()])
    h_norm, c_norm, h_max, c_max, *per_env = summary.tolist()
    pairs = zip(per_env[: norms.shape[1]], per_env[norms.shape[1] :], strict=True)
    return LSTMHealth(
        h_norm=h_norm,
        c_norm=c_norm,
        h_max=h_max,
        c_max=c_max,
        # Comparisons with NaN are False, so a NaN is unhealthy.
        unhealthy_envs=tuple(
            env
            for env, pair in enumerate(pairs)
            if not all(LSTM_MIN_NORM < norm < LSTM_MAX_NORM for norm in pair)
        ),
    )
