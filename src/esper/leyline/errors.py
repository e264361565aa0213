"""Exceptions and warnings. Every message is one sentence with the cause and the cure."""

import unicodedata

# Unicode categories that terminals and browsers interpret, or that are invisible.
UNSAFE = ("Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp")
SHOWN = 60  # characters of a wrong name or value


def visible(text: str, keep: str = "") -> str:
    """The same text with control characters and direction marks as `\\u001b`, except `keep`."""
    if text.isascii() and text.isprintable():
        return text
    return "".join(
        f"\\u{ord(letter):04x}"
        if unicodedata.category(letter) in UNSAFE and letter not in keep
        else letter
        for letter in text
    )


def shortened(text: str) -> str:
    """A name or value, cut to a length that fits in a message."""
    return text if len(text) <= SHOWN else f"{text[:SHOWN]}..."


class EsperError(Exception):
    """An error that the user can fix; the command prints it and exits with code 2."""


class EsperWarning(UserWarning):
    """The run continues, but probably not as the user intended."""


class ConfigError(EsperError, ValueError):
    """An invalid setting, name, shape or budget."""


class DataMissingError(EsperError, FileNotFoundError):
    """A data set was not found."""


class PackageMissingError(EsperError, ImportError):
    """A library of an integration is missing. `what` is a whole clause (`"TensorBoard logs need
    tensorboard"`), `extra` the extra of this package that installs it."""

    def __init__(self, what: str, extra: str) -> None:
        super().__init__(f"{what}; install it with: pip install 'esper-grow[{extra}]'")


class ForgottenCallError(EsperError, RuntimeError):
    """The user's training loop left out a call that growth needs."""


class ExportError(EsperError, RuntimeError):
    """A network cannot be converted exactly to a plain module."""


class InvalidStateMachineError(RuntimeError):
    """An impossible request to the state machine: a bug, not bad input."""
