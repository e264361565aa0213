"""Settings of an evaluation."""

import math
from dataclasses import dataclass

from esper.leyline import ConfigError
from esper.leyline.growth_settings import GrowthSettings

FIRST_TUNING_KEY = 1_000_000  # evaluation keys are below
STATIC = "static"
SCENARIOS = ("scratch", "trained", "depth")
BY_SIZE = GrowthSettings(population="auto")


@dataclass(frozen=True)
class EvaluationSettings:
    """What an evaluation compares, and how.

    arms         static, random, heuristic, scripted:NAME or the run directory of a learned policy
    keys         number of evaluation keys, from `first_key` on
    tuning_keys  number of other keys on which arms make their choices; None: 8
    steps        epochs of every arm; None: the task's
    tune         every arm chooses its learning rate from the same grid, on tuning keys
    controls     add the control arms of the arm `control_for`
    control_for  None: the last arm that is not `static`
    growth       settings of the arms that grow; its population and precision are those of all
                 arms. Networks are tested in fp32
    scenario     scratch: every arm starts with a new host; trained: with a host that was trained
                 for `steps` epochs; depth: arms grow in depth, up to the blocks of the task's host
    extra        of the scenario trained: compute budgets beyond that training, as shares of its
                 cost, ascending; of depth: compute budgets, as shares of what training all blocks
                 costs
    """

    arms: tuple[str, ...]
    keys: int = 20
    steps: int | None = None
    tune: bool = False
    controls: bool = True
    control_for: str | None = None
    growth: GrowthSettings = BY_SIZE
    scenario: str = "scratch"
    extra: tuple[float, ...] = ()
    first_key: int = 0
    tuning_keys: int | None = None

    def __post_init__(self) -> None:
        _check_scenario(self.scenario, self.extra, self.arms)
        if not self.arms:
            raise ConfigError("an evaluation needs at least one arm, such as static or heuristic")
        twice = [arm for arm in self.arms if self.arms.count(arm) > 1]
        if twice:
            raise ConfigError(f"arm {twice[0]!r} is listed more than once")
        if not 1 <= self.keys < FIRST_TUNING_KEY:
            raise ConfigError(
                f"keys must lie between 1 and {FIRST_TUNING_KEY - 1}, got {self.keys}"
            )
        if not 0 <= self.first_key <= FIRST_TUNING_KEY - self.keys:
            raise ConfigError(
                f"evaluation keys must lie below {FIRST_TUNING_KEY}, where tuning keys begin; got "
                f"{self.keys} from {self.first_key} on"
            )
        for name, value in (("tuning_keys", self.tuning_keys), ("steps", self.steps)):
            if value is not None and value < 1:
                raise ConfigError(f"{name} must be at least 1, got {value}")
        if self.control_for is not None and self.control_for not in self.arms:
            raise ConfigError(
                f"control_for must be one of {', '.join(self.arms)}, got {self.control_for!r}"
            )

    @property
    def evaluation_keys(self) -> range:
        return range(self.first_key, self.first_key + self.keys)

    @property
    def reference(self) -> str | None:
        """The arm that the controls are made for; None without controls."""
        growing = [arm for arm in self.arms if arm != STATIC]
        if not self.controls or not (self.control_for or growing):
            return None
        return self.control_for or growing[-1]


def _check_scenario(scenario: str, extra: tuple[float, ...], arms: tuple[str, ...]) -> None:
    if scenario not in SCENARIOS:
        raise ConfigError(f"scenario must be scratch, trained or depth, got {scenario!r}")
    if scenario == "scratch":
        if extra:
            raise ConfigError("extra budgets are for trained hosts; use the scenario trained")
        return
    if not extra or not all(0.0 < share < math.inf for share in extra):
        raise ConfigError(
            "extra must be fractions of the host's training compute above 0, such as 0.1,0.3; "
            f"got {', '.join(map(str, extra)) or 'none'}"
        )
    if list(extra) != sorted(set(extra)):
        raise ConfigError(f"extra must ascend, got {', '.join(map(str, extra))}")
    if scenario == "depth" and not all(arm.partition(":")[0] == "depth" for arm in arms):
        raise ConfigError("arms of the scenario depth are depth:auto and depth:SHARE")
    if STATIC in arms:
        raise ConfigError(
            "arms of the scenario trained must grow; the host that does not grow is always there, "
            "as the arm continue"
        )
