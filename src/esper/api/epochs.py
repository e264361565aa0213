"""How long a network of the user's own is trained."""

from esper.leyline import ConfigError


def decisions(epochs: int) -> int:
    """Decisions in a run of so many epochs: one between any two. Raises ConfigError."""
    if epochs < 2:
        raise ConfigError(
            f"steps={epochs} leaves nothing to decide: give at least 2 epochs, one to see what the "
            "network does and one after the first decision"
        )
    return epochs - 1
