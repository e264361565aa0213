"""simic: the one who learns to decide.

The recurrent, masked PPO agent (`agent`), its normalisers (`control`), rewards (`rewards`), what
seeds are worth (`attribution`), diagnostics of learning (`telemetry`), the loop that trains
(`training`), and a small growth problem with a known optimum (`analytic`).
"""
