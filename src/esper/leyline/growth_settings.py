"""Everything that controls growth, in one frozen object.

To add a setting, add a field with `setting(...)` to `GrowthSettings`, `Budget` or `RateSchedule`.
The command line, TOML files, the record of a run and the documentation read the fields.
"""

from collections.abc import Iterator, Mapping
from dataclasses import MISSING, dataclass, field, fields, is_dataclass, replace
from typing import Any, Literal, get_args, get_type_hints

import numpy as np
from numpy.typing import ArrayLike

from esper.leyline import constants as c
from esper.leyline.errors import ConfigError
from esper.leyline.settings import check_types, refuse_unknown, settings_of

Start = Literal["fresh", "trained"]
Incubation = Literal["isolated", "joint"]
Precision = Literal["fp32", "bf16", "fp16"]
Snapshots = Literal["host", "device", "none"]
Counterfactuals = Literal["none", "trial", "all"]
PopulationKind = Literal["auto", "looped", "fused"]
# (slot, blueprint) pairs of indices.
Topology = tuple[tuple[int, int], ...]

# A cap above this is a number of parameters or multiply-adds, not a multiple of the host's.
MOST_MULTIPLE = 100.0


def setting(
    default: Any,
    help: str,
    *,
    least: float | None = None,
    most: float | None = None,
    flag: str = "",
) -> Any:
    """A field that users can set: `help` is a sentence for the command line and the docs, `least`
    and `most` are its bounds. `flag` is its name on the command line, if not the field's."""
    metadata = {"help": help, "least": least, "most": most, "flag": flag}
    return field(default=default, metadata=metadata)


def check_bounds(settings: Any) -> None:
    """Raises ConfigError for a field of another type than it says, or out of its bounds."""
    given = {each.name: getattr(settings, each.name) for each in fields(settings)}
    check_types(given, type(settings), "")
    for each in fields(settings):
        value, notes = given[each.name], each.metadata
        if value is None or isinstance(value, bool | str):
            continue
        least, most = notes.get("least"), notes.get("most")
        if least is not None and value < least:
            raise ConfigError(f"{each.name} must be at least {least}, got {value}")
        if most is not None and value > most:
            raise ConfigError(f"{each.name} must be at most {most}, got {value}")


@dataclass(frozen=True)
class Budget:
    """Hard caps on the size of a grown network; None means no cap. Up to 100 a cap is a multiple of
    the host's size, above 100 it is a number."""

    params: float | None = setting(
        None,
        "Maximum parameters: a multiple of the host's, such as 1.5, or a number above 100.",
        flag="max_params",
    )
    macs: float | None = setting(
        None,
        "Maximum multiply-adds per example: a multiple of the host's, or a number above 100.",
        flag="max_macs",
    )

    def __post_init__(self) -> None:
        for name, value in (("params", self.params), ("macs", self.macs)):
            if value is None:
                continue
            if isinstance(value, bool) or not isinstance(value, int | float):
                raise ConfigError(f"budget {name} must be a number, got {value!r}")
            if not value >= 1.0:
                raise ConfigError(f"budget {name} is below the host itself; give 1.0 or more")
            # Compared as it is: a large int has no float.
            if value > c.MOST_COUNT * c.MOST_COUNT:
                raise ConfigError(f"budget {name} is too large to limit anything; leave it out")

    def left_for_seeds(self, host_params: int, host_macs: int) -> tuple[int | None, int | None]:
        """Parameters and multiply-adds that may be added to a host. Raises ConfigError if the host
        itself is above a cap."""
        caps = ((self.params, host_params, "parameters"), (self.macs, host_macs, "multiply-adds"))
        params, macs = (_left_for_seeds(*cap) for cap in caps)
        return params, macs


def _left_for_seeds(cap: float | None, host: int, what: str) -> int | None:
    if cap is None:
        return None
    if cap <= MOST_MULTIPLE:
        return int((cap - 1.0) * host)
    if cap < host:
        raise ConfigError(f"a budget of {cap:g} {what} is below the host itself, which has {host}")
    return int(cap) - host


@dataclass(frozen=True)
class RateSchedule:
    """Linear warm-up, constant, linear decay to 0; both are fractions of the run."""

    warmup: float = setting(
        0.0, "Fraction of the run over which the learning rate rises from 0.", least=0.0, most=1.0
    )
    decay: float = setting(
        0.0,
        "Fraction of the run, at its end, over which the learning rate falls to 0.",
        least=0.0,
        most=1.0,
    )

    def __post_init__(self) -> None:
        check_bounds(self)
        if self.warmup + self.decay > 1.0:
            raise ConfigError(
                f"warmup {self.warmup} and decay {self.decay} are longer than the run; their "
                "sum may be 1 at most"
            )

    def factor(self, progress: ArrayLike) -> np.ndarray:
        """The factor on the learning rate at `progress` (any shape, from 0 to 1)."""
        at = np.clip(np.asarray(progress, dtype=np.float64), 0.0, 1.0)
        rising = at / self.warmup if self.warmup else 1.0
        falling = (1.0 - at) / self.decay if self.decay else 1.0
        return np.minimum(np.minimum(rising, falling), np.ones_like(at))


TRAINED_SCHEDULE = RateSchedule(warmup=0.1, decay=0.5)


@dataclass(frozen=True)
class GrowthSettings:
    """What controls a run with growth. None means the default that each field names. Raises
    ConfigError for values that cannot work.

    The last six fields are for code that compares networks: `topology` are seeds that a network has
    from the beginning; `on_panic` says whether a rollback ends the episode; without `keep_best` a
    run ends with its last epoch; `counterfactuals` says of which seeds the contribution is measured
    in every epoch: of none, of those on trial (and of kept ones when they are audited), or of all;
    `max_train_macs` caps the compute of a run in multiply-adds, and `extra` is that cap
    as a share of what training the host has cost, for controllers to see.
    """

    steps: int | None = setting(
        None,
        "Decisions, one before each epoch after the first. Default: the task's.",
        least=1,
        most=c.MOST_COUNT,
    )
    start: Start = setting(
        "fresh",
        "fresh: a new network, trained for one epoch before the first decision; trained: a network "
        "that has been trained already.",
    )
    incubation: Incubation | None = setting(
        None,
        "isolated: a seed learns without acting before it is blended in; joint: it acts from the "
        "beginning. Default: isolated, and joint for a trained network.",
    )
    budget: Budget = Budget()
    max_seeds: int | None = setting(
        None, "Maximum number of seeds at a time. Default: no limit.", least=1, most=c.MOST_COUNT
    )
    schedule: RateSchedule | None = None
    cooling: bool | None = setting(
        None,
        "Scale down the output of a network that has memorised its data, so that seeds can learn; "
        "predictions do not change. Default: only for a trained network.",
    )
    blending_steps: int = setting(
        c.BLENDING_TOTAL_STEPS, "Epochs in which a seed is blended in.", least=1, most=c.MOST_COUNT
    )
    min_gradient_ratio: float = setting(
        c.GRADIENT_RATIO_THRESHOLD,
        "Least gradient of a seed, relative to the host's, to be blended in.",
        least=0.0,
    )
    min_contribution: float = setting(
        c.MIN_FOSSILIZE_CONTRIBUTION,
        "Least contribution of a seed to be kept, in units of the score's noise.",
    )
    audit_every: int | None = setting(
        None,
        "Epochs after which a kept seed may be removed, and between such audits of its "
        "contribution; a removal that costs score is undone. Default: kept for good.",
        least=1,
        most=c.MOST_COUNT,
    )
    insured: bool | None = setting(
        None,
        "Also train the network without growth, and keep the better one on validation. Default: "
        "only where that costs less than a tenth of the run.",
    )
    precision: Precision | None = setting(
        None,
        "Number format of the network while it trains: fp32, bf16 or fp16 (with a scaled loss). "
        "Default: fp32.",
    )
    device: str | None = setting(
        None,
        "Where to train: cpu, auto (the accelerator, if there is one), or a device of torch, such "
        "as cuda, cuda:1, mps or xpu. Default: the CPU, or where a model given in Python is.",
    )
    snapshots: Snapshots = setting(
        "host",
        "Where copies of the best and the last healthy network are kept: host, in CPU memory; "
        "device, which is faster and takes memory there; none: the last network is returned, and a "
        "run whose network breaks ends.",
    )
    max_grad_norm: float | None = setting(
        None, "Clip gradients to this norm. Default: no clipping."
    )
    batches_per_epoch: int | None = setting(
        None, "Batches in an epoch. Default: the whole loader.", least=1, most=c.MOST_COUNT
    )
    patience: int | None = setting(
        None, "End after so many epochs without a better score.", least=1, most=c.MOST_COUNT
    )
    max_time: float | None = setting(None, "End after so many seconds.")
    progress: bool = setting(True, "Show progress on the terminal.")
    population: PopulationKind = setting(
        "looped", "How hosts are trained: looped, one by one; fused, together; auto, by size."
    )
    topology: Topology = ()
    on_panic: Literal["terminate", "continue"] = "continue"
    keep_best: bool = True
    counterfactuals: Counterfactuals = "trial"
    max_train_macs: int | None = None
    extra: float | None = None

    def __post_init__(self) -> None:
        check_bounds(self)
        for name in ("max_grad_norm", "max_time"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise ConfigError(f"{name} must be a number above 0, got {value}")
        if self.max_train_macs is not None and not self.keeps_best:
            raise ConfigError(
                "max_train_macs needs keep_best; without it the cost of the last epoch is unknown"
            )
        for name in ("audit_every", "patience"):
            if getattr(self, name) is not None and self.snapshots == "none":
                raise ConfigError(
                    f"{name} needs copies of earlier networks; leave out snapshots='none'"
                )

    @property
    def keeps_best(self) -> bool:
        return self.keep_best and self.snapshots != "none"

    @property
    def trained(self) -> bool:
        return self.start == "trained"

    @property
    def seeds_incubate(self) -> Incubation:
        return self.incubation or ("joint" if self.trained else "isolated")

    @property
    def max_steps(self) -> int:
        """Raises ConfigError if the number of steps is not set."""
        if self.steps is None:
            raise ConfigError("the number of steps is not set; give steps=...")
        return self.steps

    @property
    def training_epochs(self) -> int:
        """The least number of epochs that a seed learns before it is blended in."""
        return max(c.MIN_TRAINING_EPOCHS, int(self.max_steps * c.TRAIN_TO_BLEND_FRACTION))

    @property
    def holding_epochs(self) -> int:
        """The number of epochs after which a seed on trial is removed."""
        return max(c.MAX_HOLDING_EPOCHS, int(self.max_steps * c.HOLDING_EPOCHS_FRACTION))

    @property
    def cools(self) -> bool:
        return self.trained if self.cooling is None else self.cooling

    @property
    def rates(self) -> RateSchedule | None:
        """The schedule in use; None if the learning rate is left alone."""
        own = TRAINED_SCHEDULE if self.schedule is None and self.trained else self.schedule
        return None if own == RateSchedule() else own

    def flat(self) -> dict[str, Any]:
        """What users can set, by name, dotted inside `budget` and `schedule`: for records."""
        known = dict(flatten(self))
        return {name: known.get(name) for name, _, _ in user_settings()}

    def updated(self, given: Mapping[str, Any]) -> "GrowthSettings":
        """With settings by name, dotted or as tables. Raises ConfigError for unknown ones."""
        own, nested = {}, dict[str, dict[str, Any]]()
        for name, value in given.items():
            table, dot, inner = name.partition(".")
            if dot:
                nested.setdefault(table, {})[inner] = value
            elif isinstance(value, Mapping):
                nested.setdefault(name, {}).update(value)
            else:
                own[name] = value
        refuse_unknown({**own, **nested}, settings_of(GrowthSettings), "")
        for name, values in nested.items():
            kind = nested_kind(GrowthSettings, name)
            if kind is None:
                raise ConfigError(f"{name} is one value, not a table")
            refuse_unknown(values, settings_of(kind), f"{name}.")
            check_types(values, kind, f"{name}.")
            before = getattr(self, name)
            own[name] = kind(**values) if before is None else replace(before, **values)
        return replace(self, **own)


def nested_kind(settings: type, name: str) -> Any:
    """The dataclass that a field holds, None if it holds a plain value."""
    hint = get_type_hints(settings)[name]
    return next((kind for kind in (hint, *get_args(hint)) if is_dataclass(kind)), None)


def user_settings(kind: type = GrowthSettings) -> Iterator[tuple[str, Any, Any]]:
    """(dotted name, type, field) of every setting that users can change, in order."""
    hints = get_type_hints(kind)
    for each in fields(kind):
        inner = nested_kind(kind, each.name)
        if inner is not None:
            for name, hint, own in user_settings(inner):
                yield f"{each.name}.{name}", hint, own
        elif each.metadata and each.default is not MISSING:
            yield each.name, hints[each.name], each


def flatten(value: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Dotted names and values of a dataclass or mapping, with those inside it."""
    items = (
        [(each.name, getattr(value, each.name)) for each in fields(value)]
        if is_dataclass(value)
        else list(value.items())
    )
    for name, entry in items:
        if is_dataclass(entry) or (isinstance(entry, Mapping) and entry):
            yield from flatten(entry, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", entry
