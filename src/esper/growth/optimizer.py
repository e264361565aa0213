"""Parameter groups for each slot in an optimiser, from the start.

The groups are empty until something grows, so their number never changes and learning-rate
schedulers keep working. Existing parameters and their state are never changed.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import product
from typing import Any

from torch import Tensor, nn
from torch.optim import LBFGS, Adagrad, Optimizer

from esper.leyline import ConfigError

SLOT_KEY = "esper_slot"
# Learning rates in a group; schedulers add those after the first.
_RATES = ("lr", "initial_lr", "max_lr", "min_lr")
# Lists of schedulers with an entry per parameter group.
_PER_GROUP_RATES = ("base_lrs", "_last_lr", "min_lrs", "max_lrs")
_PER_GROUP = (*_PER_GROUP_RATES, "lr_lambdas", "base_momentums", "max_momentums")


def add_slot_groups(
    optimizer: Optimizer,
    slot_ids: Iterable[str],
    schedulers: Iterable[Any] = (),
    *,
    lr: float | None = None,
    weight_decay: float | None = None,
    every: bool = False,
) -> None:
    """Add an empty group for each slot, with the settings of the optimiser's first group except
    for `lr` and `weight_decay` if given. With `every`, each slot gets one like each of the groups.

    `schedulers` are those made before this call; they scale `lr` like the first group's. Raises
    ConfigError for optimisers that cannot take new parameters, and for a scheduler not given.
    """
    if isinstance(optimizer, (Adagrad, LBFGS)):
        raise ConfigError(
            f"{type(optimizer).__name__} cannot take new parameters while training; "
            "use SGD, Adam, AdamW or RMSprop"
        )
    if any(SLOT_KEY in group for group in optimizer.param_groups):
        raise ConfigError("this optimiser already trains a growing network; make a new one")
    schedulers = list(schedulers)
    if "initial_lr" in optimizer.param_groups[0] and not schedulers:
        raise ConfigError(
            "a learning-rate scheduler was made before manage(); make it afterwards, "
            "or give it too: manage(optimizer, scheduler)"
        )
    before = len(optimizer.param_groups)
    slot_ids = list(slot_ids)
    for each in with_inner(optimizer):
        own = group_settings(each)
        if SLOT_KEY in own[-1]:
            continue  # it shares its groups with the outer optimiser
        found = [_seed_settings(like, lr, weight_decay) for like in (own if every else own[:1])]
        for slot_id, (settings, _) in product(slot_ids, found):
            each.add_param_group({**settings, "params": [], SLOT_KEY: slot_id})
    factors = [factor for _, factor in found]
    for scheduler in schedulers:
        _extend(scheduler, before, len(slot_ids), factors)


def _seed_settings(
    settings: dict[str, Any], lr: float | None, weight_decay: float | None
) -> tuple[dict[str, Any], float]:
    """Settings of seeds, and their learning rate relative to that in `settings`."""
    settings, factor = dict(settings), 1.0
    if lr is not None:
        # With a scheduler, `lr` is the initial learning rate.
        factor = lr / settings.get("initial_lr", settings["lr"])
        settings |= {name: settings[name] * factor for name in _RATES if name in settings}
    if weight_decay is not None:
        if "weight_decay" not in settings:
            raise ConfigError("this optimiser has no weight_decay; leave seed_weight_decay out")
        settings["weight_decay"] = weight_decay
    return settings, factor


def _extend(scheduler: Any, before: int, slots: int, factors: list[float]) -> None:
    for inner in getattr(scheduler, "_schedulers", []):
        _extend(inner, before, slots, factors)
    for name in _PER_GROUP:
        values = getattr(scheduler, name, None)
        if isinstance(values, list) and len(values) == before:
            rates = name in _PER_GROUP_RATES
            own = [v * f if rates else v for v, f in zip(values, factors, strict=False)]
            values.extend(own * slots)


@contextmanager
def few_groups(optimizer: Optimizer) -> Iterator[None]:
    """Inside, groups of empty slots are left out, and groups with equal settings are one: every
    group costs time in every step."""
    groups = optimizer.param_groups
    # The optimisers of torch treat each parameter by itself, those of others maybe not.
    by_parameter = type(optimizer).__module__.startswith("torch.optim.")
    few: list[dict[str, Any]] = []
    for group in groups:
        like = next((each for each in few if by_parameter and _equal(each, group)), None)
        if like is not None:
            like["params"] = [*like["params"], *group["params"]]
        elif group["params"]:
            few.append(dict(group) if by_parameter else group)
    optimizer.param_groups = few
    try:
        yield
    finally:
        optimizer.param_groups = groups


def _equal(one: dict[str, Any], other: dict[str, Any]) -> bool:
    own = {"params", SLOT_KEY}
    names = (one.keys() | other.keys()) - own
    return all(n in one and n in other and _same(one[n], other[n]) for n in names)


def _same(one: Any, other: Any) -> bool:
    # A learning rate may be a tensor that is changed in place.
    return one is other or (not isinstance(one, Tensor) and one == other)


@contextmanager
def scaled_rates(optimizer: Optimizer) -> Iterator[Callable[[float], None]]:
    """Yields a function that multiplies all learning rates by a factor; they are restored
    afterwards. Raises ConfigError for an optimiser without learning rates."""
    groups = {id(group): group for each in with_inner(optimizer) for group in each.param_groups}
    rates: list[tuple[dict[str, Any], Any]] = [(g, g.get("lr")) for g in groups.values()]
    if any(rate is None for _, rate in rates):
        raise ConfigError(
            f"{type(optimizer).__name__} has no learning rate; leave the schedule out"
        )

    def scale(factor: float) -> None:
        for group, rate in rates:
            group["lr"] = rate * factor

    try:
        yield scale
    finally:
        for group, rate in rates:
            group["lr"] = rate


def with_inner(optimizer: Optimizer) -> list[Optimizer]:
    """The optimiser and the optimisers inside it, as in SAM."""
    found = [optimizer]
    for each in found:
        inner = (value for value in vars(each).values() if isinstance(value, Optimizer))
        found += [value for value in inner if not any(value is known for known in found)]
    return found


def forget(optimizer: Optimizer) -> None:
    """Reset the optimiser's state, such as moments and step counts."""
    for each in with_inner(optimizer):
        each.state.clear()


def drop_parameters(optimizer: Optimizer, params: Iterable[nn.Parameter]) -> None:
    """Take these out of the optimiser, with their state."""
    dropped = {id(param): param for param in params}
    for each in with_inner(optimizer):
        for group in each.param_groups:
            group["params"] = [p for p in group["params"] if id(p) not in dropped]
        for param in dropped.values():
            each.state.pop(param, None)


def slot_groups(optimizer: Optimizer, slot_id: str) -> list[dict[str, Any]]:
    return [group for group in optimizer.param_groups if group.get(SLOT_KEY) == slot_id]


def sync_slot_group(
    optimizer: Optimizer,
    slot_id: str,
    params: list[nn.Parameter],
    like: Sequence[nn.Parameter | None] = (),
) -> None:
    """Make the slot's group hold exactly `params`; the state of removed ones is dropped. If the
    slot has several groups, each parameter joins the one made for the parameter that it is like."""
    staying = {id(param) for param in params}
    held = [p for group in slot_groups(optimizer, slot_id) for p in group["params"]]
    leaving = [p for p in held if id(p) not in staying]
    for each in with_inner(optimizer):
        for param in leaving:
            each.state.pop(param, None)
        own = [group for group in each.param_groups if SLOT_KEY not in group]
        number = {id(p): i for i, group in enumerate(own) for p in group["params"]}
        homes = [number.get(id(model), 0) for model in like] or [0] * len(params)
        for i, group in enumerate(slot_groups(each, slot_id)):
            group["params"] = [p for p, home in zip(params, homes, strict=True) if home == i]


def group_settings(optimizer: Optimizer) -> list[dict[str, Any]]:
    """The settings of each group, such as its learning rate."""
    return [{k: v for k, v in g.items() if k != "params"} for g in optimizer.param_groups]
