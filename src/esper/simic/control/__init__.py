"""Running scales of observations and rewards."""
