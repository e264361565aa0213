"""Static properties of slots, and of the candidates that could be grown in them."""

from dataclasses import dataclass

import numpy as np

from esper.growth.blueprints.catalogue import count_params, seed_traits
from esper.growth.grown_module import GrownModule
from esper.tamiyo.policy.action_masks import GrowthLimits


@dataclass(frozen=True)
class SlotFacts:
    """S slots of a host and B candidates in each, the same for all hosts of an architecture.

    host_macs      multiply-adds of the host per example
    position       float[S], 0 at the input, 1 at the output
    channels       int[S]
    positions      int[S], number of pixels or tokens that a seed reads; 1 for vectors
    params, macs   float[S], share of the host in the slot's module; NaN if unknown
    fits           bool[S, B]
    seed_params, seed_macs   int[S, B], cost of a candidate, as in the masks
    seed_layers, seed_reach  int[S, B], its number of weight matrices, and its widest kernel
    """

    host_macs: int
    position: np.ndarray
    channels: np.ndarray
    positions: np.ndarray
    params: np.ndarray
    macs: np.ndarray
    fits: np.ndarray
    seed_params: np.ndarray
    seed_macs: np.ndarray
    seed_layers: np.ndarray
    seed_reach: np.ndarray


def describe_slots(template: GrownModule, limits: GrowthLimits) -> SlotFacts:
    sites, host = template.sites, template.host
    _, traits = seed_traits(template.catalogue, sites, template.output)
    own = np.array([count_params(host.get_submodule(site.module)) for site in sites])
    macs = np.array([np.nan if site.macs is None else site.macs for site in sites])
    channels = np.array([site.channels for site in sites])
    return SlotFacts(
        host_macs=template.host_macs,
        position=np.array([site.position for site in sites]),
        channels=channels,
        positions=np.array([int(np.prod(site.shape)) for site in sites]) // channels,
        params=own / max(1, count_params(host)),
        macs=macs / max(1, template.host_macs),
        fits=limits.fits,
        seed_params=limits.params,
        seed_macs=limits.macs,
        seed_layers=traits[..., 2],
        seed_reach=traits[..., 3],
    )
