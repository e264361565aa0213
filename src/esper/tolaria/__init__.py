"""tolaria: the one who trains.

Tasks and data, families of hosts, populations of hosts, trials (the one way to make and play them),
the vectorised growth environment, attribution of what was grown, and the governor.
"""
