"""Settings of rewards, one frozen and validated dataclass per family."""

from dataclasses import dataclass, fields
from typing import ClassVar, Literal

from esper.leyline import ConfigError
from esper.leyline import constants as c

# Settings beyond these would overflow or divide by almost 0.
LARGEST, SMALLEST = 1e6, 1e-6


@dataclass(frozen=True, kw_only=True)
class RewardConfig:
    """Settings of every reward. Numbers must not be negative unless `signed`.

    mode                     name in the table of modes
    gamma                    if given, a run with another discount is refused
    hacking_ratio_threshold  ratio of contribution to improvement that counts as disproportion
    """

    signed: ClassVar[tuple[str, ...]] = ()

    mode: str
    gamma: float | None = None
    hacking_ratio_threshold: float = 5.0

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if not isinstance(value, int | float):
                continue
            # NaN fails the comparison too.
            if not abs(value) <= LARGEST:
                raise ConfigError(f"{field.name} must lie within +-{LARGEST:g}, got {value}")
            if field.name not in self.signed:
                self._require_at_least(0, field.name)

    def _require_at_least(self, least: float, name: str) -> None:
        if not getattr(self, name) >= least:
            raise ConfigError(f"{name} must be at least {least}, got {getattr(self, name)}")


@dataclass(frozen=True, kw_only=True)
class ObjectiveRewardConfig(RewardConfig):
    """Final score minus initial score minus costs.

    score_weight      reward for 100 pp of validation score
    param_cost        cost of adding the host's own number of parameters
    compute_cost      cost of doubling the compute of the whole episode
    rollback_penalty  cost of an episode that the governor ends
    """

    mode: str = "objective"
    score_weight: float = 1.0
    param_cost: float = 0.01
    compute_cost: float = 0.01
    rollback_penalty: float = c.OBJECTIVE_ROLLBACK_PENALTY


@dataclass(frozen=True, kw_only=True)
class BudgetRewardConfig(RewardConfig):
    """Score of the kept network minus initial score, where a budget limits compute.

    score_weight      reward for 100 pp of validation score
    param_cost        cost of adding the host's own number of parameters: small, because an epoch
                      of a larger network already takes more of the budget
    rollback_penalty  cost of an episode that the governor ends
    """

    mode: str = "budget"
    score_weight: float = 1.0
    param_cost: float = 0.002
    rollback_penalty: float = c.OBJECTIVE_ROLLBACK_PENALTY


@dataclass(frozen=True, kw_only=True)
class ContributionRewardConfig(RewardConfig):
    """Rewards from the contribution of each seed, measured by ablation. Scores are in pp.

    Costs and penalties are positive numbers that are subtracted.

    shaping_scale     factor in mode 'shaped' of all terms but score and rollback: small, so that
                      their sum does not outweigh a point of score; values below are before it
    contribution_weight        reward per pp of credited contribution, lent until the episode ends
    max_ratio_penalty          largest deduction for disproportionate contribution
    improvement_safe_threshold largest improvement that is too small to divide by
    blending_warning           for blending a seed although the network got worse
    holding_penalty            'linear': rate * (n - 1) in the n-th epoch of HOLDING;
                               'exponential': base ** (n - 2); both from the second, up to the cap
    contributing_threshold     least contribution of a kept seed for terminal bonuses
    terminal_score_weight      reward per pp of the final score
    param_budget, param_penalty_weight   modes 'sparse' and 'minimal': cost of `param_budget`
                               parameters added to the host
    """

    signed: ClassVar[tuple[str, ...]] = ("improvement_safe_threshold", "contributing_threshold")

    mode: str = "shaped"
    shaping_scale: float = 0.01
    contribution_weight: float = 1.0
    max_ratio_penalty: float = 0.3
    improvement_safe_threshold: float = 0.1
    blending_warning: float = 0.1
    holding_penalty: Literal["linear", "exponential"] = "linear"
    holding_penalty_rate: float = 2.5
    holding_penalty_base: float = 3.0
    holding_penalty_cap: float = 10.0
    pbrs_weight: float = 0.3
    epoch_progress_bonus: float = c.EPOCH_PROGRESS_BONUS
    max_progress_bonus: float = c.MAX_PROGRESS_BONUS
    rent_weight: float = 0.5
    max_rent: float = 8.0
    germinate_cost: float = 0.02
    fossilize_cost: float = 0.01
    cull_cost: float = 0.005
    fossilize_base_bonus: float = 0.5
    fossilize_contribution_scale: float = 0.1
    fossilize_noncontributing_penalty: float = 0.2
    fossilize_degraded_penalty: float = 0.5
    cull_good_seed_penalty: float = 0.3
    auto_cull_penalty: float = 0.2
    contributing_threshold: float = 1.0
    terminal_score_weight: float = 0.1
    fossil_terminal_bonus: float = 3.0
    rollback_penalty: float = c.GOVERNOR_DEATH_PENALTY
    simplified_intervention_cost: float = 0.01
    simplified_score_weight: float = 3.0
    simplified_fossil_bonus: float = 2.0
    sparse_reward_scale: float = 1.0
    param_budget: int = 500_000
    param_penalty_weight: float = 0.1
    early_cull_epochs: int = 5
    early_cull_penalty: float = 0.1

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.holding_penalty not in ("linear", "exponential"):
            raise ConfigError(
                f"holding_penalty must be 'linear' or 'exponential', got {self.holding_penalty!r}"
            )
        self._require_at_least(1, "param_budget")
        self._require_at_least(1, "holding_penalty_base")


@dataclass(frozen=True, kw_only=True)
class LossRewardConfig(RewardConfig):
    """Rewards from the validation loss, for tasks without a meaningful score.

    baseline_loss, target_loss   loss of a network that guesses, and of a good one
    typical_loss_delta_std       spread of the loss from one epoch to the next
    regression_penalty_scale     weight of a rise of the loss relative to a fall; below 1 a loss
                                 that goes up and down again earns a reward
    grace_epochs                 a seed pays no rent while younger than this
    """

    signed: ClassVar[tuple[str, ...]] = ("baseline_loss", "target_loss")

    mode: str = "loss"
    baseline_loss: float
    target_loss: float
    typical_loss_delta_std: float
    loss_delta_weight: float = 5.0
    max_loss_delta: float = 5.0
    regression_penalty_scale: float = 1.0
    rent_weight: float = 0.05
    max_rent: float = 5.0
    grace_epochs: int = 3
    pbrs_weight: float = 0.1
    terminal_loss_weight: float = 1.0
    rollback_penalty: float = c.GOVERNOR_DEATH_PENALTY

    def __post_init__(self) -> None:
        super().__post_init__()
        self._require_at_least(SMALLEST, "typical_loss_delta_std")
        if not self.baseline_loss - self.target_loss >= SMALLEST:
            raise ConfigError(
                f"target_loss must be below baseline_loss, "
                f"got {self.target_loss} and {self.baseline_loss}"
            )


def check_gamma(config: RewardConfig, gamma: float) -> None:
    """Raise ConfigError for an invalid discount, or for another one than the config names."""
    if not 0.0 <= gamma <= 1.0:
        raise ConfigError(f"gamma must lie between 0 and 1, got {gamma}")
    if config.gamma is not None and config.gamma != gamma:
        raise ConfigError(
            f"the reward is configured for gamma={config.gamma} but the run uses gamma={gamma}; "
            "leave gamma out of the reward"
        )
