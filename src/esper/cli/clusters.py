"""`--ray`: workers on a cluster of Ray."""

from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from esper.ray import Cluster

RAY = (
    "Train hosts on the Ray cluster at this address (auto: the one of this machine); without an "
    "address on one that is started here. Changes nothing but the speed."
)


def cluster_at(address: str | None) -> "AbstractContextManager[Cluster | None]":
    """The cluster, connected in a `with`; None if there is to be none."""
    if address is None:
        return nullcontext()
    from esper.ray import Cluster

    return Cluster(address)
