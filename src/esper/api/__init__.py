"""The front door for Python: grow a model of your own, or let a loop of your own grow it."""

from esper.api.body import Body, attach
from esper.api.growing import Grown, History, grow

__all__ = ["Body", "Grown", "History", "attach", "grow"]
