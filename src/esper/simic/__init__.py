"""simic: the one who learns to decide.

The recurrent, masked PPO agent (`agent`), its normalisers (`control`), rewards (`rewards`),
diagnostics of learning (`telemetry`), the loop that trains (`training`), recorded episodes and
learning from them (`recordings`), and a small growth problem with a known optimum (`analytic`).
"""
