"""Rewards: pure functions of a transition; `modes.compute_reward` computes all of them."""
