"""Rewards: pure functions of a transition. `compute_reward` is the only door."""
