"""A policy that others can use: a folder with its weights and a card that says what it is worth.

policy.safetensors   the weights, and in the header how to make the network
card.toml            for people: what it was trained on, how it was evaluated, where it fails
"""

import json
import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from esper.leyline.errors import ConfigError, shortened

CARD, WEIGHTS = "card.toml", "policy.safetensors"
UNMEASURED = "unmeasured"
# Those that come with the package.
SHIPPED = Path(__file__).parents[1] / "policies"
_NAME = re.compile(r"[a-z0-9][a-z0-9._-]{0,59}")


@dataclass(frozen=True)
class PolicyCard:
    """What a user must know before using a policy. What nobody has measured is UNMEASURED.

    worth       in one line, for the list
    trained_on  hosts, data, episodes
    evaluated   on what, against what, with which figures
    fails       where it is no better than a rule, or worse
    parameters  of its network
    default     it is the one that `pretrained` stands for
    settings    those of its training run, by dotted name
    """

    name: str
    worth: str
    trained_on: str
    evaluated: str
    fails: str
    parameters: int
    default: bool = False
    settings: Mapping[str, Any] = field(default_factory=dict)

    @property
    def unmeasured(self) -> tuple[str, ...]:
        """The parts that somebody still has to write."""
        said = {name: getattr(self, name).strip() for name in SAID}
        return tuple(name for name, text in said.items() if text in ("", UNMEASURED))

    def as_toml(self) -> str:
        lines = [
            f"{item.name} = {_toml(getattr(self, item.name))}"
            for item in fields(self)
            if item.name != "settings"
        ]
        lines += ["", "[settings]"]
        known = {name: value for name, value in self.settings.items() if value is not None}
        lines += [f"{_toml(name)} = {_toml(value)}" for name, value in sorted(known.items())]
        return "\n".join(lines) + "\n"


SAID = ("worth", "trained_on", "evaluated", "fails")


def _toml(value: Any) -> str:
    """Texts, numbers, flags, and lists or tables of them: JSON but for the tables."""
    if isinstance(value, Mapping):
        inside = ", ".join(f"{_toml(name)} = {_toml(item)}" for name, item in value.items())
        return f"{{ {inside} }}" if inside else "{}"
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_toml, value))}]"
    # The one character that a JSON string may hold and a TOML string may not.
    return json.dumps(value, ensure_ascii=False, allow_nan=False).replace("\x7f", "\\u007f")


def check_policy_name(name: str) -> None:
    """Raises ConfigError for what would be no good name of a folder."""
    if not _NAME.fullmatch(name):
        raise ConfigError(
            "the name of a policy is up to 60 small letters, digits, dots, dashes and underscores, "
            f"got {shortened(name)!r}"
        )


def read_card(folder: Path) -> PolicyCard:
    """Raises ConfigError, in a sentence, if the folder has none or it is not complete."""
    path = folder / CARD
    try:
        found = tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(f"{folder} is no policy: it has no {CARD}") from None
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} cannot be read: {error}") from error
    for item in fields(PolicyCard):
        wanted = {"parameters": int, "default": bool, "settings": dict}.get(item.name, str)
        missing = item.name not in found and item.name not in ("default", "settings")
        if missing or not isinstance(found.get(item.name, wanted()), wanted):
            raise ConfigError(f"{path} does not say {item.name} as it must: {item.type}")
    unknown = sorted(found.keys() - {item.name for item in fields(PolicyCard)})
    if unknown:
        raise ConfigError(f"{path} says {unknown[0]}, which is no part of a card")
    return PolicyCard(**found)


def shipped_policies() -> list[tuple[Path, PolicyCard]]:
    """(folder, card) of the policies that come with the package, the default first."""
    folders = sorted(path.parent for path in SHIPPED.glob(f"*/{CARD}"))
    found = [(folder, read_card(folder)) for folder in folders]
    return sorted(found, key=lambda each: (not each[1].default, each[1].name))


def find_policy(name: str | None = None) -> tuple[Path, PolicyCard]:
    """One that comes with the package, the default if none is named. Raises ConfigError that lists
    the others."""
    there = shipped_policies()
    if not there:
        raise ConfigError(f"no policy comes with this version of Esper; {HOW_TO_TRAIN}")
    if name is None:
        return there[0]
    for folder, card in there:
        if card.name == name:
            return folder, card
    names = ", ".join(card.name for _, card in there)
    raise ConfigError(f"no policy {shortened(name)!r} comes with Esper; there are {names}")


HOW_TO_TRAIN = "esper train ppo --network set --out runs/mine trains one"
