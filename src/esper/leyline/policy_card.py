"""A published policy: a folder with its weights and a card.

policy.safetensors   the weights, with the settings of the network in the header
card.toml            for readers: training data, evaluation, limits
"""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from esper.leyline.errors import ConfigError, shortened
from esper.leyline.files import parse_toml, read_text

CARD, WEIGHTS = "card.toml", "policy.safetensors"
UNMEASURED = "unmeasured"
# The policies that come with the package.
SHIPPED = Path(__file__).parents[1] / "policies"
_NAME = re.compile(r"[a-z0-9][a-z0-9._-]{0,59}")


@dataclass(frozen=True)
class PolicyCard:
    """What a user must know before using a policy. A text without a measurement is UNMEASURED.

    worth       one line for the list
    trained_on  hosts, data, episodes
    evaluated   data, baselines and results
    fails       where it is no better than a rule
    parameters  of its network
    sha256      checksum of its weights; written with them
    default     `pretrained` means this policy
    settings    of its training run, by dotted name
    """

    name: str
    worth: str
    trained_on: str
    evaluated: str
    fails: str
    parameters: int
    sha256: str = ""
    default: bool = False
    settings: Mapping[str, Any] = field(default_factory=dict)

    @property
    def unmeasured(self) -> tuple[str, ...]:
        """The texts that are still missing."""
        return tuple(n for n in TEXTS if getattr(self, n).strip() in ("", UNMEASURED))

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


TEXTS = ("worth", "trained_on", "evaluated", "fails")


def _toml(value: Any) -> str:
    """Texts, numbers, flags, and lists or tables of them: like JSON except for tables."""
    if isinstance(value, Mapping):
        inside = ", ".join(f"{_toml(name)} = {_toml(item)}" for name, item in value.items())
        return f"{{ {inside} }}" if inside else "{}"
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_toml, value))}]"
    # The only character that is legal in a JSON string but not in a TOML string.
    return json.dumps(value, ensure_ascii=False, allow_nan=False).replace("\x7f", "\\u007f")


def check_policy_name(name: str) -> None:
    """Raises ConfigError unless the name is fit for a folder."""
    if not _NAME.fullmatch(name):
        raise ConfigError(
            "the name of a policy is up to 60 lower-case letters, digits, dots, dashes and "
            f"underscores, got {shortened(name)!r}"
        )


def read_card(folder: Path) -> PolicyCard:
    """Raises ConfigError if the folder has no card or it is incomplete."""
    path = folder / CARD
    if not path.exists():
        raise ConfigError(f"{folder} is not a policy: it has no {CARD}")
    text = read_text(path)
    try:
        found = parse_toml(text)
    except ValueError as error:
        raise ConfigError(f"{path} cannot be read: {error}") from error
    for item in fields(PolicyCard):
        wanted = {"parameters": int, "default": bool, "settings": dict}.get(item.name, str)
        missing = item.name not in found and item.name not in ("default", "settings")
        if missing or not isinstance(found.get(item.name, wanted()), wanted):
            raise ConfigError(f"{path} needs {item.name} as {item.type}")
    unknown = sorted(found.keys() - {item.name for item in fields(PolicyCard)})
    if unknown:
        raise ConfigError(f"{path} has {unknown[0]}, which is not a field of a card")
    return PolicyCard(**found)


def shipped_policies() -> list[tuple[Path, PolicyCard]]:
    """(folder, card) of the policies that come with the package, the default first."""
    folders = sorted(path.parent for path in SHIPPED.glob(f"*/{CARD}"))
    found = [(folder, read_card(folder)) for folder in folders]
    return sorted(found, key=lambda each: (not each[1].default, each[1].name))


def find_policy(name: str | None = None) -> tuple[Path, PolicyCard]:
    """A policy that comes with the package, by default the default one; raises ConfigError."""
    found = shipped_policies()
    if not found:
        raise ConfigError(f"no policy comes with this version of Esper; {HOW_TO_TRAIN}")
    if name is None:
        return found[0]
    for folder, card in found:
        if card.name == name:
            return folder, card
    names = ", ".join(card.name for _, card in found)
    raise ConfigError(f"no policy {shortened(name)!r} comes with Esper; there are {names}")


HOW_TO_TRAIN = "esper train ppo --network set --out runs/mine trains one"
