"""The functions for Python users: grow a model, attach growth to a training loop, train a policy,
record episodes and learn from them."""

import esper.growth.export as exporting
from esper.api.body import Body, attach
from esper.api.callbacks import Callback, Caller, check_script, find_controller, load_policy
from esper.api.checks import checked
from esper.api.growing import grow
from esper.api.grown import Grown, load, save_network
from esper.api.growth_warnings import GrowthWarnings, warn_if_out_of_domain
from esper.api.recordings import imitate, learn_offline, record
from esper.api.reward_comparison import RewardComparison, compare_rewards
from esper.api.slots import Slots
from esper.api.training import (
    config_of,
    episode_steps,
    export_policy,
    one_thread,
    resume_ppo,
    train_ppo,
)
from esper.growth import slot_choice
from esper.observatory.explain import explain as explain_decision

export, list_slots = checked()(exporting.export), checked()(slot_choice.list_slots)
explain = checked()(explain_decision)
