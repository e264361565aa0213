"""A policy over sets: it fits hosts with any number of slots, and any catalogue of blueprints."""

from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from esper.simic.agent.network import FactoredRecurrentActorCritic, NetworkConfig, make_head, pick
from esper.simic.agent.types import Hidden
from esper.tamiyo.policy.set_features import (
    CANDIDATE_FEATURES,
    FITS,
    GLOBAL_FEATURES,
    PRESENT,
    SLOT_FEATURES,
    SetLayout,
)


class Encoded(NamedTuple):
    """context [..., K], slots [..., S, E] and candidates [..., S, B, E], all for the heads."""

    context: Tensor
    slots: Tensor
    candidates: Tensor


class PointerHead(nn.Module):
    """Scores [..., n] of items [..., n, I], each seen beside the same context [..., K].

    What it adds to all scores alike would change nothing, so that there is no last bias.
    """

    def __init__(self, item: int, context: int, width: int) -> None:
        super().__init__()
        self.of_item = nn.Linear(item, width)
        self.of_context = nn.Linear(context, width, bias=False)
        self.score = nn.Linear(width, 1, bias=False)

    def forward(self, items: Tensor, context: Tensor) -> Tensor:
        seen = self.of_item(items) + self.of_context(context).unsqueeze(-2)
        return self.score(seen.relu()).squeeze(-1)


class SetActorCritic(FactoredRecurrentActorCritic):
    """The same decisions, made by pointing at slots and candidates; observations are those of
    `set_features`.

        candidate -> Linear, ReLU                                  pooled into its slot
        slot, pooled candidates -> Linear, LayerNorm, ReLU         pooled over the host
        run, pooled slots -> Linear, LayerNorm, ReLU -> LSTM -> LayerNorm

    Context is the LSTM's output beside the pooled slots. Op, blend and value are read from it, a
    slot is scored beside it and the op that was drawn, a candidate beside it and the slot that was
    drawn. No parameter belongs to a place: permuting slots or blueprints permutes the policy, and
    absent slots change nothing.
    """

    def _build(self, config: NetworkConfig) -> None:
        self.layout = SetLayout(config.num_slots, config.num_blueprints)
        own, width = config.embedding_dim, config.resolved_head_width
        # Without a bias what does not fit, all zeros, stays zero; that it fits is the bias.
        self.candidate_net = nn.Sequential(
            nn.Linear(len(CANDIDATE_FEATURES), own, bias=False), nn.ReLU()
        )
        self.slot_net = nn.Sequential(
            nn.Linear(len(SLOT_FEATURES) + 2 * own, own), nn.LayerNorm(own), nn.ReLU()
        )
        self.feature_net = nn.Sequential(
            nn.Linear(len(GLOBAL_FEATURES) + 2 * own, config.feature_dim),
            nn.LayerNorm(config.feature_dim),
            nn.ReLU(),
        )
        self._build_memory(config)
        context = config.lstm_hidden_dim + 2 * own
        self.slot_head = PointerHead(own, context + config.num_ops, width)
        self.blueprint_head = PointerHead(own, context + own, width)
        self.blend_head = make_head(context, width, config.num_blends)
        self.op_head = make_head(context, width, config.num_ops)
        self.value_head = make_head(context, width, 1)

    def encode(self, observations: Tensor, hidden: Hidden) -> tuple[Encoded, Hidden]:
        """What the heads see, and the hidden state after the last step."""
        self._check_shapes(observations, hidden)
        run, slots, candidates = self.layout.split(observations)
        encoded = self.candidate_net(candidates)
        fitting = _pooled(encoded, candidates[..., FITS])
        embedded = self.slot_net(torch.cat([slots, fitting], dim=-1))
        pooled = _pooled(embedded * slots[..., PRESENT, None], slots[..., PRESENT])
        output, hidden = self._remember(torch.cat([run, pooled], dim=-1), hidden)
        return Encoded(torch.cat([output, pooled], dim=-1), embedded, encoded), hidden

    def _logits(self, name: str, features: Encoded, drawn: dict[str, Tensor]) -> Tensor:
        context = features.context
        if name == "slot":
            op = F.one_hot(drawn["op"], self.config.num_ops).to(context.dtype)
            return self.slot_head(features.slots, torch.cat([context, op], dim=-1))
        if name == "blueprint":
            slot = pick(features.slots, drawn["slot"])
            candidates = pick(features.candidates.flatten(-2), drawn["slot"])
            own = candidates.unflatten(-1, features.candidates.shape[-2:])
            return self.blueprint_head(own, torch.cat([context, slot], dim=-1))
        return self.head(name)(context)

    def _value_of(self, features: Encoded) -> Tensor:
        return super()._value_of(features.context)

    def fitted(self, num_slots: int, num_blueprints: int) -> "SetActorCritic":
        """This policy for other numbers of slots and blueprints; the parameters are shared."""
        config = replace(
            self.config,
            observation_dim=SetLayout(num_slots, num_blueprints).size,
            num_slots=num_slots,
            num_blueprints=num_blueprints,
        )
        other = SetActorCritic(config)
        other.load_state_dict(self.state_dict(keep_vars=True), assign=True)
        return other


def new_network(config: NetworkConfig, key: int = 0) -> FactoredRecurrentActorCritic:
    """The kind of network that the config names."""
    kind = SetActorCritic if config.kind == "set" else FactoredRecurrentActorCritic
    return kind(config, key)


def _pooled(items: Tensor, counted: Tensor) -> Tensor:
    """[..., n, E], at least 0, and [..., n] of 0 and 1 -> mean and maximum [..., 2 E] of the items
    that count; 0 if there are none. Those that do not count must be 0."""
    number = counted.sum(dim=-1, keepdim=True).clamp(min=1.0)
    return torch.cat([items.sum(dim=-2) / number, items.amax(dim=-2)], dim=-1)
