"""tamiyo: controllers and what they see.

Signals and observations, action masks, and the controllers: static, random, scripted, heuristic.
"""
