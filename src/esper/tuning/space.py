"""What a search may choose: settings, and what each may be."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from esper.leyline import ConfigError
from esper.leyline.settings import nearest


@dataclass(frozen=True)
class Numbers:
    """From `low` to `high`, both included: whole numbers if they are; with `log` each power of ten
    is as likely as another."""

    name: str
    low: float
    high: float
    log: bool = False

    def with_start(self, value: float) -> "Numbers":
        """A range that holds what the search starts from, too."""
        return replace(self, low=min(self.low, value), high=max(self.high, value))


@dataclass(frozen=True)
class Words:
    name: str
    options: tuple[str, ...]

    def with_start(self, value: str) -> "Words":
        return self if value in self.options else replace(self, options=(value, *self.options))


Setting = Numbers | Words
Chosen = Mapping[str, Any]


def searched(space: Sequence[Setting], names: Sequence[str], start: Chosen) -> list[Setting]:
    """The settings of these names, all if none is given; each can stay as it is. Raises ConfigError
    for a name that is not of the space."""
    known = [setting.name for setting in space]
    for name in names:
        if name not in known:
            raise ConfigError(
                f"no setting {name!r} to search; there are {', '.join(known)}{nearest(name, known)}"
            )
    wanted = [setting for setting in space if not names or setting.name in names]
    return [setting.with_start(start[setting.name]) for setting in wanted]
