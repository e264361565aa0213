"""Hosts: small networks with slots. Any nn.Module can be one; these are the ones of our tasks.

A host names its slots in `slot_modules`, a tuple of dotted module names.
"""
