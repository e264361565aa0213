"""The front door for Python: grow a model of your own, or let a loop of your own grow it; train a
policy, record and learn from episodes."""

from esper.api.body import Body, attach
from esper.api.callbacks import Callback
from esper.api.controllers import find_controller, load_policy
from esper.api.growing import grow
from esper.api.grown import Grown, load
from esper.api.lessons import imitate, learn_offline, record
from esper.api.training import config_of, one_thread, resume_ppo, train_ppo

__all__ = [
    "Body",
    "Callback",
    "Grown",
    "attach",
    "config_of",
    "find_controller",
    "grow",
    "imitate",
    "learn_offline",
    "load",
    "load_policy",
    "one_thread",
    "record",
    "resume_ppo",
    "train_ppo",
]
