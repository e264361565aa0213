"""tolaria: the one who trains."""
