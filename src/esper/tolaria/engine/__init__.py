"""The training engine: hosts, their populations, the growth cycle and one run of it."""
