"""The learner: a recurrent policy over factored, masked actions, and the PPO that trains it."""

from esper.simic.agent.advantages import compute_gae, compute_per_head_advantages
from esper.simic.agent.config import PPOConfig
from esper.simic.agent.network import FactoredRecurrentActorCritic, NetworkConfig
from esper.simic.agent.ppo import PPOAgent, ReplayMismatchError
from esper.simic.agent.rollout_buffer import TamiyoRolloutBuffer
from esper.simic.agent.saving import load_agent, save_agent
from esper.simic.agent.types import Decision, Hidden, PPOUpdateMetrics

__all__ = [
    "Decision",
    "FactoredRecurrentActorCritic",
    "Hidden",
    "NetworkConfig",
    "PPOAgent",
    "PPOConfig",
    "PPOUpdateMetrics",
    "ReplayMismatchError",
    "TamiyoRolloutBuffer",
    "compute_gae",
    "compute_per_head_advantages",
    "load_agent",
    "save_agent",
]
