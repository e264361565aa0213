"""Families of hosts, which a policy learns on: one small file per task."""

from esper.leyline import ConfigError
from esper.tolaria.families import digits
from esper.tolaria.families.base import Family, Member, Shape, Split
from esper.tolaria.families.hosts import MemberHosts, hosts_of

BUILT_IN = {family.name: family for family in digits.FAMILIES}


def find_family(name: str) -> Family:
    """Raises ConfigError, listing the names, if there is no such family."""
    if name not in BUILT_IN:
        raise ConfigError(f"no family {name!r}; there are {', '.join(BUILT_IN)}")
    return BUILT_IN[name]


__all__ = [
    "BUILT_IN",
    "Family",
    "Member",
    "MemberHosts",
    "Shape",
    "Split",
    "find_family",
    "hosts_of",
]
