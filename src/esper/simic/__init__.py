"""simic: the one who learns to decide."""
