"""The learner: a recurrent policy over factored, masked actions, and the PPO that trains it."""
