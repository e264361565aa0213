"""What can go wrong. Every message is one sentence that names the culprit and the cure."""

SHOWN = 60  # characters of a name or value that is wrong


def shortened(text: str) -> str:
    """What a message shows of a name or value: never a page of it."""
    return text if len(text) <= SHOWN else f"{text[:SHOWN]}..."


class EsperError(Exception):
    """Anything the user can mend; the command prints it and exits with code 2."""


class EsperWarning(UserWarning):
    """What goes on, but hardly as its user means it."""


class ConfigError(EsperError, ValueError):
    """A setting, name, shape or budget that cannot work."""


class SlotIdError(ConfigError):
    """Not a slot id of the form r{row}c{col}."""


class DataMissingError(EsperError, FileNotFoundError):
    """A data set is not where it should be."""


class PackageMissingError(EsperError, ImportError):
    """An integration is used without the library that it is for. `what` is a whole clause
    (`"TensorBoard logs need tensorboard"`), `extra` the extra of ours that installs it."""

    def __init__(self, what: str, extra: str) -> None:
        super().__init__(f"{what}; install it with: pip install 'esper-grow[{extra}]'")


class ForgottenCallError(EsperError, RuntimeError):
    """A loop of the user's own left out a call without which nothing would grow."""


class ExportError(EsperError, RuntimeError):
    """A network that cannot be turned into a plain module faithfully."""


class InvalidStateMachineError(RuntimeError):
    """The state machine was asked for something impossible: a defect, not bad input."""
