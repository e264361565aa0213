"""Data sets: reading, fetching, verifying.

One module per data set, each with a `load(root)` that returns `DataSplits`; `catalogue` lists them
all and fetches them. The catalogue does not import torch, so that listing data sets is quick.
"""
