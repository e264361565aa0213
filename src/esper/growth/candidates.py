"""Seeds that might be planted, all at once on one pass of the network that they would grow in.

The pass carries rows for each candidate behind those of the batch: where a candidate adds what it
adds, a copy of the batch is appended, with the addition. So what comes before that place runs once
for all of them, and what follows runs on all copies together. The first rows are the network's own.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode
from torch.utils.hooks import RemovableHandle

from esper.growth.blueprints.bypass import widen
from esper.growth.grown_module import GrownModule, keyed
from esper.growth.outputs import host_place, put, slot_place, take
from esper.growth.seed_slot import SeedSlot
from esper.growth.sites import batch_size, call_model, evaluating, map_tensors
from esper.leyline import IS_BLENDED, InjectionSpec, SeedStage

# How far apart two passes over the same examples may be and still count as the same.
TOLERANCE = 1e-4


@contextmanager
def frozen(network: GrownModule) -> Iterator[None]:
    """Evaluation mode without gradients; what a host counts or averages in buffers is put back
    afterwards."""
    kept = [(buffer, buffer.clone()) for buffer in network.buffers()]
    try:
        with evaluating(network):
            yield
    finally:
        with torch.no_grad():
            for buffer, before in kept:
                buffer.copy_(before)


def new_candidate(network: GrownModule, slot: int, blueprint: int, key: int) -> SeedSlot:
    """A newborn seed that acts in full and is not planted; raises as `GrownModule.new_seed`."""
    seed, _ = network.new_seed(slot, blueprint, 0, key)
    return _acting(network, slot, seed, blueprint, network.catalogue[blueprint].kind)


def _acting(
    network: GrownModule, slot: int, seed: nn.Module, blueprint: int, kind: str
) -> SeedSlot:
    candidate = SeedSlot(network.sites[slot])
    candidate.plant(seed, None, blueprint, 0, kind)
    candidate.set_blend(SeedStage.HOLDING, 1.0)
    return candidate.eval()


class CandidatePass:
    """The network with each of the candidates alone. Use it inside `acting`; the network must be in
    evaluation mode, and no candidate in a slot that holds a seed."""

    def __init__(self, network: GrownModule, candidates: Sequence[SeedSlot]) -> None:
        self.network, self.candidates = network, candidates
        # Their paths end behind rows that are not there yet where they begin.
        blended = [slot for _, slot in network.each_slot() if IS_BLENDED[slot.stage]]
        self.branches = [slot for slot in blended if slot.kind == "branch"]
        self.bypasses = [slot for slot in blended if slot.kind == "bypass"]

    @contextmanager
    def acting(self) -> Iterator[Callable[[Any], list[Any]]]:
        """Gives a function of the model's input: outputs of the network as it is and with each
        candidate, in their order."""
        host, handles = self.network.host, []
        muted = [slot for _, slot in self.network.each_slot() if slot.kind not in ("", "residual")]
        at_slots = [slot for slot in self.candidates if slot.kind != "bypass"]
        places = {slot.site.module: slot.site for slot in (*self.branches, *at_slots)}
        try:
            for slot in muted:
                slot.muted = True
            for name in places:
                module = host.get_submodule(name)
                handles.append(module.register_forward_hook(partial(self._at_slot, name)))
            handles.append(host.register_forward_hook(self._at_output))
            # Each before the others on its layer, those that are there before any candidate.
            wide = [slot for slot in self.candidates if slot.kind == "bypass"]
            for slot in reversed([*self.bypasses, *wide]):
                handles += self._hook_bypass(slot)
            yield self._run
        finally:
            for handle in handles:
                handle.remove()
            for slot in muted:
                slot.muted = False

    def _hook_bypass(self, slot: SeedSlot) -> list[RemovableHandle]:
        first, second = _layers(self.network, slot)
        candidate = slot in self.candidates

        def read(module: nn.Module, args: Any) -> None:
            h = args[0][: self.size].detach() if candidate else args[0]
            self.changes[slot] = slot.change(h.clone())

        def add(module: nn.Module, args: Any, output: Tensor) -> Tensor:
            change = self.changes[slot]
            if not candidate:
                return output + self._for_all(change, output)
            self.copies.append(slot)
            return torch.cat([output, output[: self.size].detach() + change])

        return [
            first.register_forward_pre_hook(read),
            second.register_forward_hook(add, prepend=True),
        ]

    def _for_all(self, change: Tensor, target: Tensor) -> Tensor:
        """Copies that begin between where a seed reads and where it adds have what the network
        itself has."""
        sizes = list(zip(change.shape, target.shape, strict=True))
        dim = next((d for d, (mine, theirs) in enumerate(sizes) if mine != theirs), None)
        if dim is None:
            return change
        missing = (target.shape[dim] - change.shape[dim]) // self.size
        return torch.cat([change, *[change.narrow(dim, 0, self.size)] * missing], dim)

    def _run(self, inputs: Any) -> list[Any]:
        self.size = batch_size(inputs)
        self.copies: list[SeedSlot] = []
        self.changes: dict[SeedSlot, Tensor] = {}
        output = call_model(self.network.host, inputs)
        place = {candidate: 1 + i for i, candidate in enumerate(self.copies)}
        return [self._chunk(output, i) for i in (0, *(place[each] for each in self.candidates))]

    def _at_slot(self, name: str, module: nn.Module, args: Any, output: Any) -> Any:
        place = slot_place(output)
        assert place is not None
        h = take(output, place)
        for slot in self.branches:
            if slot.site.module == name:
                self.changes[slot] = slot.change(h.clone())
        here = [
            each for each in self.candidates if each.site.module == name and each.kind != "bypass"
        ]
        if not here:
            return None
        dim = here[0].site.batch_dim
        # The host may change its features in place further on; no candidate changes these.
        base = h.narrow(dim, 0, self.size).detach().clone()
        changes = {each: each.change(base) for each in here}
        self.changes |= {each: c for each, c in changes.items() if each.kind == "branch"}
        added = {each: base + changes[each] for each in here if each.kind != "branch"}
        self.copies += added
        return put(output, place, torch.cat([h, *added.values()], dim)) if added else None

    def _at_output(self, module: nn.Module, args: Any, output: Any) -> Any:
        own = [each for each in self.candidates if each.kind == "branch"]
        if not own and not self.branches:
            return None
        place = host_place(output)
        assert place is not None
        out = take(output, place)
        for slot in self.branches:
            out = out + self._for_all(self.changes[slot], out)
        base = out[: self.size].detach()
        self.copies += own
        return put(output, place, torch.cat([out, *(base + self.changes[each] for each in own)]))

    def _chunk(self, output: Any, index: int) -> Any:
        """The output of one copy. What was made before there was a copy is the network's own."""

        def rows(tensor: Tensor) -> Tensor:
            if tensor.dim() == 0 or len(tensor) % self.size:
                return tensor
            first = index * self.size if (index + 1) * self.size <= len(tensor) else 0
            return tensor[first : first + self.size]

        return map_tensors(rows, output)


def takes_copies(network: GrownModule, slot: int, inputs: Any, *, bypass: bool = False) -> bool:
    """Can the network go on from an empty slot (or where a bypass of that slot would add) with more
    rows than it was given? Not if it remembers how many there were, adds what it had before, or
    mixes examples."""
    site = network.sites[slot]
    if (site.calls > 1 and not bypass) or batch_size(inputs) < 2:
        return False
    if bypass and (site.widening is None or site.widening.reads[0] != site.widening.batch):
        return False
    # A copy that is far from the batch: examples that are mixed show it.
    double = _acting(network, slot, nn.Identity(), -1, "residual")
    if bypass:
        double = _acting(network, slot, _strong_bypass(site), -1, "bypass")
        double.to(next(network.host.parameters()))
    with frozen(network):
        plain = call_model(network.host, inputs)
        handles = _hook(network, double)
        try:
            doubled = call_model(network.host, inputs)
        finally:
            for handle in handles:
                handle.remove()
        try:
            with CandidatePass(network, [double]).acting() as run:
                found = run(inputs)
        except (RuntimeError, TypeError, ValueError, IndexError):
            return False
    return all(map(_same, found, (plain, doubled)))


def _strong_bypass(site: InjectionSpec) -> nn.Module:
    assert site.widening is not None
    with keyed(0):
        seed = widen(site.widening, 1.0)
        for parameter in seed.parameters():
            nn.init.normal_(parameter)
    return seed


def _layers(network: GrownModule, slot: SeedSlot) -> list[nn.Module]:
    assert slot.site.widening is not None
    layers = (slot.site.widening.first, slot.site.widening.second)
    return [network.host.get_submodule(layer.module) for layer in layers]


def _hook(network: GrownModule, slot: SeedSlot) -> list[RemovableHandle]:
    """Let a seed that is not planted act."""
    if slot.kind == "bypass":
        first, second = _layers(network, slot)
        return [
            first.register_forward_pre_hook(slot.on_layer_input),
            second.register_forward_hook(slot.on_later_output, prepend=True),
        ]
    module = network.host.get_submodule(slot.site.module)
    return [module.register_forward_hook(slot.on_slot_output)]


def _same(output: Any, expected: Any) -> bool:
    place, wanted = host_place(output), host_place(expected)
    if place is None or place != wanted:
        return False
    a, b = take(output, place), take(expected, place)
    return a.shape == b.shape and torch.allclose(a, b, rtol=TOLERANCE, atol=TOLERANCE)


def macs_behind(network: GrownModule, example: Any) -> np.ndarray:
    """int[2, S]: multiply-adds per example that the host alone does after each slot, and after the
    slot or the layer that a bypass adds to, whichever comes first."""
    counter, passed = FlopCounterMode(display=False), {}

    def note(name: str, *_: Any) -> None:
        passed[name] = counter.get_total_flops()

    slots = [site.module for site in network.sites]
    ends = [site.widening.second.module if site.widening else site.module for site in network.sites]
    handles = [
        network.host.get_submodule(name).register_forward_hook(partial(note, name))
        for name in {*slots, *ends}
    ]
    absent = [False] * len(network.sites)
    try:
        with frozen(network), network.coalition(absent), counter:
            call_model(network.host, example)
    finally:
        for handle in handles:
            handle.remove()
    at = np.array([[passed[name] for name in names] for names in (slots, ends)])
    at[1] = at.min(axis=0)
    return (counter.get_total_flops() - at) // 2 // batch_size(example)
