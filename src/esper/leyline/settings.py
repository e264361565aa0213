"""Settings from a TOML file or flags, checked against the fields of a dataclass."""

import difflib
import sys
import types
from collections.abc import Iterable, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from esper.leyline.errors import ConfigError
from esper.leyline.files import parse_toml, read_text

MOST_DIGITS = 10**60  # a larger number is not printed


def read_toml(path: Path) -> dict[str, Any]:
    """Raises ConfigError if the file is missing or not TOML."""
    text = read_text(path)
    try:
        return parse_toml(text)
    except ValueError as error:
        raise ConfigError(f"{path} is not TOML: {error}") from error


def settings_of(kind: type) -> set[str]:
    """The names of a dataclass's fields."""
    return {f.name for f in fields(kind)}


def refuse_unknown(given: Mapping[str, Any], known: set[str], prefix: str) -> None:
    """Raises ConfigError for an unknown setting; `prefix` is the name of its table and a dot."""
    for name in given:
        if name not in known:
            raise ConfigError(f"no setting {prefix}{name}{nearest(name, known, prefix)}")


def nearest(name: str, known: Iterable[str], prefix: str = "") -> str:
    """The end of a message about a wrong name: the closest known name, if there is one."""
    close = difflib.get_close_matches(name, sorted(known), n=1, cutoff=0.4)
    return f"; did you mean {prefix}{close[0]}?" if close else ""


_WORDS = {
    int: "a whole number",
    float: "a number",
    bool: "true or false",
    str: "text",
    type(None): "nothing",
}


def check_types(given: Mapping[str, Any], kind: type, prefix: str) -> None:
    """Raises ConfigError for a value whose type is not that of its field in `kind`."""
    hints = get_type_hints(kind)
    for name, value in given.items():
        if not _fits(value, hints[name]):
            wanted = _words(hints[name])
            huge = isinstance(value, int) and abs(value) > MOST_DIGITS
            shown = "a number that is too large" if huge else repr(value)
            raise ConfigError(f"{prefix}{name} must be {wanted}, got {shown}")


def _fits(value: Any, hint: Any) -> bool:
    origin = get_origin(hint)
    if origin in (Union, types.UnionType):
        return any(_fits(value, option) for option in get_args(hint))
    if origin is Literal:
        return value in get_args(hint)
    if origin is tuple:
        return isinstance(value, tuple | list) and all(_fits(v, get_args(hint)[0]) for v in value)
    if origin is not None:
        return isinstance(value, dict) and all(_fits(v, float) for v in value.values())
    if hint is float:
        # JSON and TOML files of a run cannot hold infinity.
        number = isinstance(value, int | float) and not isinstance(value, bool)
        # Compared as it is, because a large int has no float.
        return number and -sys.float_info.max <= value <= sys.float_info.max
    if hint is int:
        return isinstance(value, int) and not isinstance(value, bool)
    return isinstance(value, hint)


def _words(hint: Any) -> str:
    options = get_args(hint) if get_origin(hint) in (Union, types.UnionType) else (hint,)
    if get_origin(hint) is Literal:
        return " or ".join(map(repr, get_args(hint)))
    if get_origin(hint) is tuple:
        return f"a list, each {_words(get_args(hint)[0])}"
    named = [o for o in options if o is not type(None)]
    if len(named) == 1 and named[0] is not hint:
        return _words(named[0])
    return " or ".join(_WORDS.get(o, "a table of numbers") for o in named)
