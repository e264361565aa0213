"""Settings of PPO."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from esper.leyline import HEAD_NAMES, ConfigError, constants

# Minibatches of 2 environments took twice the time on the analytic problem, and learnt no better.
MOST_MINIBATCHES, LEAST_ENVS = 4, 4


@dataclass(frozen=True)
class PPOConfig:
    learning_rate: float = 3e-4
    # Discount of future rewards, and of TD errors in GAE.
    gamma: float = constants.DEFAULT_GAMMA
    gae_lambda: float = 0.97
    # Passes over the data, and number of minibatches (of whole environments) per pass; None: up to
    # 4, of at least 4 environments each.
    epochs: int = 4
    minibatches: int | None = None
    # Largest change of a probability ratio that the surrogate rewards.
    clip_ratio: float = 0.2
    # The update stops once the joint KL exceeds 1.5 times this; None: never.
    target_kl: float | None = 0.015
    # Weight of the normalised entropy; it moves linearly to the end value during annealing.
    entropy_coef: float = 0.05
    entropy_coef_end: float | None = None
    entropy_anneal_updates: int = 0
    # The coefficient never falls below this; adaptive: the floor rises when few ops are legal.
    entropy_coef_min: float = 0.01
    adaptive_entropy_floor: bool = False
    # Factors of entropy_coef by head; 1 for heads left out.
    entropy_coef_per_head: Mapping[str, float] = field(default_factory=dict)
    # Subtract from each advantage the mean of the rest of the group at the same step.
    group_baseline: bool = False
    value_coef: float = 0.5
    # Number of updates at the start in which only the critic's head learns. For a pretrained
    # policy, whose critic would otherwise mislead it at first.
    critic_first: int = 0
    value_loss: Literal["mse", "huber"] = "mse"
    huber_delta: float = 1.0
    # Largest change of a value in the value loss (in units of return); None: do not clip.
    value_clip: float | None = None
    # Largest gradient norm: of all parameters, or of trunk, policy heads and critic separately.
    max_grad_norm: float = constants.MAX_GRAD_NORM
    clip_separately: bool = False
    # Decay of the critic's head only: decaying the policy heads would flatten the policy.
    weight_decay: float = 0.0
    # A ratio outside these limits is an outlier, and if it lasts, an anomaly.
    ratio_explosion: float = constants.RATIO_EXPLOSION_THRESHOLD
    ratio_collapse: float = constants.RATIO_COLLAPSE_THRESHOLD
    # Check before each choice that an action is legal and that logits are finite. Waits for the
    # device.
    validate_masks: bool = True
    # A torch.compile backend such as 'inductor'; None: run eagerly.
    compile_backend: str | None = None

    def __post_init__(self) -> None:
        for names, holds, what in _RULES:
            for name in names.split():
                if not holds(getattr(self, name)):
                    raise ConfigError(f"{name} must be {what}, got {getattr(self, name)!r}")
        if self.ratio_collapse > self.ratio_explosion:
            raise ConfigError("ratio_collapse must not be above ratio_explosion")
        lowest = min(self.entropy_coef, self.final_entropy_coef)
        if lowest < self.entropy_coef_min:
            raise ConfigError(
                f"entropy_coef and entropy_coef_end must not be below entropy_coef_min, "
                f"got {lowest} and {self.entropy_coef_min}"
            )

    def minibatches_of(self, envs: int) -> int:
        """The number of minibatches for this many environments."""
        by_envs = min(MOST_MINIBATCHES, max(1, envs // LEAST_ENVS))
        return min(self.minibatches or by_envs, envs)

    @property
    def final_entropy_coef(self) -> float:
        return self.entropy_coef if self.entropy_coef_end is None else self.entropy_coef_end


_RULES: tuple[tuple[str, Callable[[Any], bool], str], ...] = (
    ("learning_rate clip_ratio max_grad_norm huber_delta", lambda x: x > 0, "positive"),
    ("learning_rate", lambda x: x <= 1, "at most 1"),
    ("gamma gae_lambda", lambda x: 0 <= x <= 1, "between 0 and 1"),
    ("epochs", lambda x: isinstance(x, int) and x >= 1, "at least 1"),
    (
        "minibatches",
        lambda x: x is None or (isinstance(x, int) and x >= 1),
        "at least 1 or None",
    ),
    ("entropy_coef entropy_coef_min entropy_anneal_updates", lambda x: x >= 0, "at least 0"),
    ("value_coef critic_first weight_decay", lambda x: x >= 0, "at least 0"),
    ("target_kl value_clip", lambda x: x is None or x > 0, "positive or None"),
    ("value_loss", lambda x: x in ("mse", "huber"), "'mse' or 'huber'"),
    (
        "entropy_coef_per_head",
        lambda x: set(x) <= set(HEAD_NAMES),
        f"keyed by {', '.join(HEAD_NAMES)}",
    ),
)
