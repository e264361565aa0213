"""The learner: a recurrent policy over factored, masked actions, and the PPO that trains it."""

from esper.simic.agent.advantages import (
    check_groups,
    compute_gae,
    compute_per_head_advantages,
    head_relevance,
    leave_one_out,
)
from esper.simic.agent.config import PPOConfig
from esper.simic.agent.metrics import PPOUpdateMetrics
from esper.simic.agent.network import FactoredRecurrentActorCritic, NetworkConfig
from esper.simic.agent.ppo import PPOAgent, ReplayMismatchError
from esper.simic.agent.rollout import VectorEnv, action_draws, play_round
from esper.simic.agent.rollout_buffer import TamiyoRolloutBuffer
from esper.simic.agent.saving import agent_from_state, agent_state
from esper.simic.agent.set_network import SetActorCritic, new_network
from esper.simic.agent.types import Decision, Hidden, MaskTensors
