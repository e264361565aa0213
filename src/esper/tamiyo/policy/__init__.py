"""Observations, action masks, and the masked distribution of a policy."""
