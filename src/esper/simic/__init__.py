"""simic: the one who learns to decide.

The recurrent, masked PPO agent (`agent`), its normalisers (`control`), `rewards`, who deserves them
(`attribution`), what to watch while it learns (`telemetry`), evaluation and learning from episodes
(`training`), and a small growth problem with a known optimum (`analytic`).
"""
