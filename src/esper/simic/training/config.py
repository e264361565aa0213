"""Every setting of a training run: defaults, presets, a strict TOML file, flags.

Later ones override earlier ones; there are presets for tasks, families and warm starts. In flags
and messages a setting inside a table is written with a dot, as in `ppo.learning_rate`.
"""

from collections.abc import Mapping
from dataclasses import MISSING, dataclass, field, fields, is_dataclass, replace
from pathlib import Path
from typing import Any

from esper.leyline import ConfigError, LifecycleOp, constants
from esper.leyline.growth_settings import GrowthSettings, flatten, user_settings
from esper.leyline.settings import check_types, nearest, read_toml, refuse_unknown, settings_of
from esper.simic.agent.config import PPOConfig
from esper.simic.agent.network import NetworkSizes
from esper.simic.rewards.config import RewardConfig, check_gamma
from esper.simic.rewards.modes import MODES
from esper.simic.telemetry.anomaly_detector import AnomalyThresholds
from esper.tolaria.families import find_family

# Small hosts of one architecture are trained together.
BY_SIZE = GrowthSettings(population="auto")
USER_SETTINGS = frozenset(name for name, _, _ in user_settings())

# The costs of growth come at once and its gains epochs later, and episodes are finite: any discount
# is a bias against growing. Rewards are divided by their standard deviation, so returns are of the
# order of the episode's length; with the agent's default weight of the value loss, the gradient of
# the critic would dominate that of the policy.
DEFAULT_PPO = PPOConfig(gamma=1.0, gae_lambda=1.0, value_coef=0.05)


@dataclass(frozen=True, kw_only=True)
class NetworkSettings(NetworkSizes):
    """The policy's network, as far as the task does not determine it."""

    # Initial logits of ops by name, 0 for the others. If all are 0, legal ops are equally probable,
    # and seeds are removed by chance long before they could be kept.
    op_bias: Mapping[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        refuse_unknown(self.op_bias, {op.name for op in LifecycleOp}, "network.op_bias.")


# Minimum and maximum of settings that are whole numbers.
RANGES = (
    ("rounds", 1, constants.MOST_COUNT),
    ("envs", 1, constants.MOST_ENVS),
    ("group", 1, constants.MOST_ENVS),
    ("batch", 1, constants.MOST_COUNT),
    ("validate_every", 1, constants.MOST_COUNT),
    ("key", 0, constants.MOST_KEY),
)


@dataclass(frozen=True)
class TrainingConfig:
    """One training run. `ppo.gamma` is the discount of returns and of reward shaping."""

    # What the hosts learn; see `esper tasks`.
    task: str = "digits"
    # Draw the host of each group from this family; None: all hosts have the task's architecture.
    family: str | None = None
    # Environments that begin with the same host and train on the same data in the same order.
    group: int = 1
    # Rounds of one episode in every environment and one update of the policy.
    rounds: int = 200
    # Hosts that are trained in each round.
    envs: int = 16
    # Where the task's host can grow, as names of its modules separated by commas, and the examples
    # of a batch of it; None: as the task says.
    slots: str | None = None
    batch: int | None = None
    # Runs with the same key and settings are identical to the bit.
    key: int = 0
    # What is rewarded. To compare two modes, train two policies: `esper train ab`.
    reward_mode: str = "objective"
    # Divide rewards by the standard deviation of the returns from each step on, without clipping;
    # False: by their own standard deviation, clipped at 10.
    scale_returns: bool = False
    # Every so many rounds the policy is scored on the validation hosts of the family, with its most
    # probable actions, and the best one so far is kept in the folder `best`. None: never.
    validate_every: int | None = None
    # Keep observations, actions and rewards for offline learning: some megabytes per round.
    keep_episodes: bool = False
    # Run whose policy and observation statistics are the start of training; None: from scratch.
    warm_start: str | None = None
    # How hosts are trained and grow. With a family its members decide on start, steps and schedule.
    growth: GrowthSettings = BY_SIZE
    # Settings of PPO, of the policy's network, and of the reward modes (param_cost, ...).
    ppo: PPOConfig = DEFAULT_PPO
    network: NetworkSettings = field(default_factory=NetworkSettings)
    reward: Mapping[str, Any] = field(default_factory=dict)
    # When an update of the policy counts as an anomaly; ratios are limited by `ppo.ratio_...`.
    anomalies: AnomalyThresholds = field(default_factory=AnomalyThresholds)

    def __post_init__(self) -> None:
        for name, least, most in RANGES:
            value = getattr(self, name)
            if value is not None and not least <= value <= most:
                raise ConfigError(f"{name} must be from {least} to {most}, got {value}")
        if self.envs % self.group:
            raise ConfigError(
                f"{self.envs} environments cannot be divided into groups of {self.group}; "
                "make envs a multiple of group"
            )
        self._check_family()
        check_gamma(self.reward_config, self.ppo.gamma)

    def _check_family(self) -> None:
        if self.family is None:
            return
        task = find_family(self.family).task.name
        if task != self.task:
            raise ConfigError(
                f"family {self.family!r} is for task {task!r}, not {self.task!r}; leave out task"
            )
        for name, value in (
            ("steps", self.growth.steps),
            ("slots", self.slots),
            ("batch", self.batch),
        ):
            if value is not None:
                raise ConfigError(f"family {self.family!r} determines {name}; leave out {name}")

    @property
    def reward_config(self) -> RewardConfig:
        return make_reward(self.reward_mode, self.reward)

    def flat(self) -> dict[str, Any]:
        """All settings by dotted name, for a flat TOML file that `load_config` reads."""
        known = dict(flatten(self))
        return {
            name: value
            for name, value in known.items()
            if not name.startswith("growth.") or name.removeprefix("growth.") in USER_SETTINGS
        }


PRESETS: dict[str, dict[str, Any]] = {
    "digits": {
        "ppo.learning_rate": 5e-4,
        "ppo.entropy_coef": 0.03,
        "ppo.entropy_coef_per_head": {"op": 0.3},
        "network.op_bias": {"CULL": -4.0, "FOSSILIZE": 3.0},
    },
    "pydocs": {"ppo.entropy_coef": 0.1},
    "linuxdocs": {"ppo.entropy_coef": 0.1},
    "cifar10": {"ppo.entropy_coef": 0.1},
    "cifar10_blind": {"ppo.entropy_coef": 0.1},
    "cifar10_deep": {"ppo.entropy_coef": 0.08},
}

# With reward mode 'loss', by task: the loss of a guess, of a good network, and the spread of its
# change from epoch to epoch.
GUESS_OF_10, GUESS_OF_256 = 2.303, 5.545
LOSS_PRESETS = {
    "digits": (GUESS_OF_10, 0.15, 0.05),
    "mnist": (GUESS_OF_10, 0.05, 0.02),
    "fashion_mnist": (GUESS_OF_10, 0.3, 0.03),
    **dict.fromkeys(("cifar10", "cifar10_deep"), (GUESS_OF_10, 0.5, 0.05)),
    "cifar10_blind": (GUESS_OF_10, 1.0, 0.05),
    **dict.fromkeys(("cifar10_2k", "cifar10_2k_wide", "cifar10_10k"), (GUESS_OF_10, 1.0, 0.05)),
    "pydocs": (GUESS_OF_256, 1.5, 0.05),
    "linuxdocs": (GUESS_OF_256, 1.2, 0.05),
}
LOSS_SETTINGS = ("baseline_loss", "target_loss", "typical_loss_delta_std")

# Different hosts are compared by what they gain; within a group only actions differ.
FAMILY_PRESET = {"group": 8, "reward_mode": "budget", "network.kind": "set"}

# The critic of a clone is untrained, and its advantages would soon ruin a good policy.
WARM_START_PRESET = {"ppo.critic_first": 4}

# All slots, and all candidates, share their weights, so fewer suffice.
SET_PRESET = {"network.feature_dim": 64, "network.lstm_hidden_dim": 64}


def load_config(
    path: str | Path | None = None,
    flags: Mapping[str, Any] | None = None,
    *,
    presets: bool = True,
) -> TrainingConfig:
    """Settings from a TOML file, if any, and from flags by dotted name; flags with None are
    ignored. Raises ConfigError for unknown settings and invalid values."""
    given = read_toml(Path(path)) if path is not None else {}
    for name, value in (flags or {}).items():
        if value is not None:
            _put(given, name, value)
    settings: dict[str, Any] = {}
    if isinstance(given.get("family"), str):
        given.setdefault("task", find_family(given["family"]).task.name)
    for name, value in _presets(given).items() if presets else ():
        _put(settings, name, value)
    for name, value in given.items():
        added = isinstance(value, dict)
        settings[name] = {**settings.get(name, {}), **value} if added else value
    return _build(settings)


def _presets(given: Mapping[str, Any]) -> dict[str, Any]:
    task, network = given.get("task", TrainingConfig.task), given.get("network")
    preset = PRESETS.get(task, {}) if isinstance(task, str) else {}
    if given.get("family") is not None:
        preset = preset | FAMILY_PRESET
    if given.get("warm_start") is not None:
        preset = preset | WARM_START_PRESET
    mode = given.get("reward_mode", preset.get("reward_mode"))
    if mode == "loss" and isinstance(task, str) and task in LOSS_PRESETS:
        values = zip(LOSS_SETTINGS, LOSS_PRESETS[task], strict=True)
        preset = preset | {f"reward.{name}": value for name, value in values}
    kind = preset.get("network.kind", NetworkSettings.kind)
    if isinstance(network, dict):
        kind = network.get("kind", kind)
    return preset | SET_PRESET if kind == "set" else preset


def make_reward(mode: str, settings: Mapping[str, Any]) -> RewardConfig:
    """The config of a reward mode. Raises ConfigError for a setting that it does not have."""
    if mode not in MODES:
        known = ", ".join(MODES)
        raise ConfigError(f"no reward mode {mode!r}; there are {known}{nearest(mode, MODES)}")
    family = MODES[mode].config
    refuse_unknown(settings, settings_of(family) - {"mode"}, "reward.")
    own = {**settings, "mode": mode}
    check_types(own, family, "reward.")
    for setting in fields(family):
        needed = setting.default is MISSING and setting.default_factory is MISSING
        if needed and setting.name not in own:
            raise ConfigError(f"reward mode {mode!r} needs reward.{setting.name} to be set")
    return family(**own)


def _put(settings: dict[str, Any], dotted: str, value: Any) -> None:
    table, dot, name = dotted.partition(".")
    if dot:
        settings.setdefault(table, {})[name] = value
    else:
        settings[table] = value


def _build(settings: dict[str, Any]) -> TrainingConfig:
    """Every field is a setting; a field that is a dataclass or a mapping is a table."""
    refuse_unknown(settings, settings_of(TrainingConfig), "")
    defaults, chosen = TrainingConfig(), dict(settings)
    for name, value in settings.items():
        default = getattr(defaults, name)
        if not is_dataclass(default) and not isinstance(default, Mapping):
            check_types({name: value}, TrainingConfig, "")
        elif not isinstance(value, dict):
            raise ConfigError(f"{name} must be a table of settings, got {value!r}")
        elif isinstance(default, GrowthSettings):
            chosen[name] = default.updated(value)
        elif is_dataclass(default) and not isinstance(default, type):
            refuse_unknown(value, settings_of(type(default)), f"{name}.")
            check_types(value, type(default), f"{name}.")
            chosen[name] = replace(default, **value)
    return TrainingConfig(**chosen)
