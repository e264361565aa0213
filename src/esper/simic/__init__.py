"""simic: the one who learns to decide.

The recurrent, masked PPO agent (`agent`), its normalisers (`control`), and a small growth problem
with a known optimum (`analytic`).
"""
