"""Recording episodes and learning from them: behaviour cloning and offline learning."""
