"""Hosts: small networks with slots. Any nn.Module can be one; these are the ones of our tasks.

A host names its slots in `slot_modules`, a tuple of dotted module names.
"""

from esper.growth.hosts.cnn import CNNHost
from esper.growth.hosts.mlp import MLPHost
from esper.growth.hosts.transformer import TransformerHost

__all__ = ["CNNHost", "MLPHost", "TransformerHost"]
