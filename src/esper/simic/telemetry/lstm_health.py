"""Health of the hidden state of a recurrent policy."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from esper.leyline.constants import LSTM_MAX_NORM, LSTM_MIN_NORM

_SIZES = ("h_norm", "c_norm", "h_max", "c_max")


@dataclass(frozen=True)
class LSTMHealth:
    """Of hidden and cell state: largest L2 norm of any environment, largest absolute entry."""

    h_norm: float
    c_norm: float
    h_max: float
    c_max: float
    has_nan: bool
    has_inf: bool
    unhealthy_envs: tuple[int, ...]

    @property
    def is_healthy(self) -> bool:
        return not self.unhealthy_envs

    def flat(self) -> dict[str, float]:
        """Columns of a row of metrics."""
        sizes = {f"lstm_{name}": getattr(self, name) for name in _SIZES}
        return sizes | {"lstm_unhealthy_envs": len(self.unhealthy_envs)}


@torch.compiler.disable
@torch.no_grad()
def compute_lstm_health(hidden: tuple[Tensor, Tensor] | None) -> LSTMHealth | None:
    """For h and c of shape [layers, E, H]; None for None. One transfer from the device.

    An environment is healthy if both norms are finite and neither saturated nor extinct.
    """
    if hidden is None:
        return None
    both = torch.stack([state.detach().float() for state in hidden])
    if both.dim() != 4:
        raise ValueError(f"hidden states must be [layers, envs, size], got {list(both.shape[1:])}")
    norms = both.square().sum(dim=(1, 3)).sqrt()
    summary = torch.cat(
        [
            both.abs().amax(dim=(1, 2, 3)),
            torch.stack([both.isnan().any(), both.isinf().any()]).float(),
            norms.reshape(-1),
        ]
    ).tolist()
    h_max, c_max, has_nan, has_inf, *per_env = summary
    n_envs = norms.shape[1]
    h_norms, c_norms = per_env[:n_envs], per_env[n_envs:]
    return LSTMHealth(
        h_norm=_largest(h_norms),
        c_norm=_largest(c_norms),
        h_max=h_max,
        c_max=c_max,
        has_nan=bool(has_nan),
        has_inf=bool(has_inf),
        # Comparisons with NaN are False, so a NaN is unhealthy.
        unhealthy_envs=tuple(
            env
            for env, pair in enumerate(zip(h_norms, c_norms, strict=True))
            if not all(LSTM_MIN_NORM < norm < LSTM_MAX_NORM for norm in pair)
        ),
    )


def _largest(norms: list[float]) -> float:
    return math.nan if any(map(math.isnan, norms)) else max(norms)
