"""tamiyo: signals, observations and action masks, and the controllers that decide by them: static,
random, each, scripted, heuristic.
"""
