"""Families of hosts, on which a policy is trained."""

from esper.tolaria.families.digits import BUILT_IN, find_family

__all__ = ["BUILT_IN", "find_family"]
