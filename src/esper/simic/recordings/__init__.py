"""Learning from episodes that were played before: recording them, cloning, offline learning."""
