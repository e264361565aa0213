"""tamiyo: the one who decides.

Signals and observations, action masks, and the controllers: static, random, scripted, heuristic.
"""
