"""Learning to grow, and finding out what it is worth: evaluation and learning from episodes."""
