"""Hosts at birth, many of one architecture."""

from collections.abc import Iterator, Sequence
from itertools import starmap

import torch
from torch import nn

from esper.growth.grown_module import keyed
from esper.leyline import draw_key
from esper.tolaria.engine.recipe import HostRecipe, new_host


def newborns(
    recipe: HostRecipe, keys: Sequence[int], first: nn.Module
) -> Iterator[tuple[int, nn.Module]]:
    """Each key with its host, which holds until the next is asked for; `first` is that of the first
    key.

    To draw the parameters of a host anew takes a tenth of the time that it takes to build another,
    so that is done where it comes to the same: hosts whose parameters are drawn by their modules,
    in the order of these. It is tried with the first key.
    """
    device = next(first.parameters()).device
    yield keys[0], first
    if len(keys) == 1:
        return
    yield keys[1], (host := new_host(recipe, keys[1], device))
    redrawn = recipe.weights is None and device.type == "cpu"
    if redrawn:
        _draw(host, keys[0])
        pairs = zip(host.parameters(), first.parameters(), strict=True)
        redrawn = all(starmap(torch.equal, pairs))
    for key in keys[2:]:
        if redrawn:
            _draw(host, key)
        yield key, host if redrawn else new_host(recipe, key, device)


def _draw(host: nn.Module, key: int) -> None:
    with keyed(draw_key(key, "host")):
        for module in host.modules():
            draw = getattr(module, "reset_parameters", None)
            if draw is not None:
                draw()
