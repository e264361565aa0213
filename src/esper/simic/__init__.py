"""simic: the one who learns to decide.

The recurrent, masked PPO agent (`agent`), its normalisers (`control`), rewards (`rewards`), credit
by ablation (`attribution`), the diagnostics of learning (`telemetry`), and a small growth problem
with a known optimum (`analytic`).
"""
