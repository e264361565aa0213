"""Learning to grow, and finding out what it is worth: training, evaluation, learning from episodes.

`config` holds every setting, `loop` plays and learns, `checkpoint` saves and restores `state`.
"""
