"""Data sets: the catalogue, downloading, verifying, loading.

`images` and `text` have one function per data set that returns `DataSplits`. The catalogue does not
import torch, so that listing data sets is quick.
"""
