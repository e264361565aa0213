"""What is known of slots, and of what could be grown in them, before anything grows."""

from dataclasses import dataclass

import numpy as np

from esper.growth.blueprints.catalogue import count_params, seed_traits
from esper.growth.grown_module import GrownModule
from esper.tamiyo.policy.action_masks import GrowthLimits


@dataclass(frozen=True)
class SlotFacts:
    """S slots of a host, and B candidates in each. They are the same for every host that is made
    like it, at any step.

    host_macs      multiply-adds of the host per example
    position       float[S], 0 at the input, 1 at the output
    channels       int[S]
    places         int[S], how many pixels or tokens a seed reads; 1 if it reads vectors
    params, macs   float[S], the share of the host in the slot's module; NaN if not known
    fits           bool[S, B]
    seed_params, seed_macs   int[S, B], what a candidate costs, as the masks count it
    seed_layers, seed_reach  int[S, B], its weight matrices, and its widest kernel
    """

    host_macs: int
    position: np.ndarray
    channels: np.ndarray
    places: np.ndarray
    params: np.ndarray
    macs: np.ndarray
    fits: np.ndarray
    seed_params: np.ndarray
    seed_macs: np.ndarray
    seed_layers: np.ndarray
    seed_reach: np.ndarray


def describe_slots(template: GrownModule, limits: GrowthLimits) -> SlotFacts:
    """The facts of hosts that are made like `template`, whose limits are `limits`."""
    sites, host = template.sites, template.host
    _, traits = seed_traits(template.catalogue, sites, template.output)
    own = np.array([count_params(host.get_submodule(site.module)) for site in sites])
    macs = np.array([np.nan if site.macs is None else site.macs for site in sites])
    channels = np.array([site.channels for site in sites])
    return SlotFacts(
        host_macs=template.host_macs,
        position=np.array([site.position for site in sites]),
        channels=channels,
        places=np.array([int(np.prod(site.shape)) for site in sites]) // channels,
        params=own / max(1, count_params(host)),
        macs=macs / max(1, template.host_macs),
        fits=limits.fits,
        seed_params=limits.params,
        seed_macs=limits.macs,
        seed_layers=traits[..., 2],
        seed_reach=traits[..., 3],
    )
