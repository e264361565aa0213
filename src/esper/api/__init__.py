"""The front door for Python: grow a model of your own, or let a loop of your own grow it."""

from esper.api.body import Body, attach
from esper.api.growing import Grown, grow
from esper.api.training import find_controller, load_policy, resume_ppo, train_ppo

__all__ = [
    "Body",
    "Grown",
    "attach",
    "find_controller",
    "grow",
    "load_policy",
    "resume_ppo",
    "train_ppo",
]
