"""The front door for Python: grow a model of your own, or let a loop of your own grow it; train a
policy, record and learn from episodes."""

from esper import growth
from esper.api.body import Body, attach
from esper.api.callbacks import Callback, Caller
from esper.api.checks import checked
from esper.api.controllers import check_script, find_controller, load_policy
from esper.api.explaining import explain
from esper.api.growing import grow
from esper.api.grown import Grown, load, save_network
from esper.api.lessons import imitate, learn_offline, record
from esper.api.policies import export_policy
from esper.api.training import (
    config_of,
    episode_steps,
    one_thread,
    resume_ppo,
    train_ppo,
)
from esper.api.watch import Watch, warn_of_other_ground

export, list_slots = checked()(growth.export), checked()(growth.list_slots)

__all__ = [
    "Body",
    "Callback",
    "Caller",
    "Grown",
    "Watch",
    "attach",
    "check_script",
    "config_of",
    "episode_steps",
    "explain",
    "export",
    "export_policy",
    "find_controller",
    "grow",
    "imitate",
    "learn_offline",
    "list_slots",
    "load",
    "load_policy",
    "one_thread",
    "record",
    "resume_ppo",
    "save_network",
    "train_ppo",
    "warn_of_other_ground",
]
