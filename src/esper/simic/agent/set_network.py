"""A policy for any number of slots and blueprints."""

from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from esper.simic.agent.network import (
    FactoredRecurrentActorCritic,
    NetworkConfig,
    Recurred,
    make_head,
    pick,
)
from esper.tamiyo.policy.set_features import (
    CANDIDATE_FEATURES,
    FITS,
    GLOBAL_FEATURES,
    PRESENT,
    SLOT_FEATURES,
    SetLayout,
)


class Encoded(NamedTuple):
    """Inputs of the heads: context [..., K], slots [..., S, E], candidates [..., S, B, E]."""

    context: Tensor
    slots: Tensor
    candidates: Tensor


class PointerHead(nn.Module):
    """Scores [..., n] of items [..., n, I] given a context [..., K].

    The last layer has no bias: it would not change the distribution.
    """

    def __init__(self, item: int, context: int, width: int) -> None:
        super().__init__()
        self.of_item = nn.Linear(item, width)
        self.of_context = nn.Linear(context, width, bias=False)
        self.score = nn.Linear(width, 1, bias=False)

    def forward(self, items: Tensor, context: Tensor) -> Tensor:
        features = self.of_item(items) + self.of_context(context).unsqueeze(-2)
        return self.score(features.relu()).squeeze(-1)


class SetActorCritic(FactoredRecurrentActorCritic):
    """The same decisions from sets of slots and candidates, as `set_features` observes them.

        candidate -> Linear, ReLU                                  pooled into its slot
        slot, pooled candidates -> Linear, LayerNorm, ReLU         pooled over the host
        run, pooled slots -> Linear, LayerNorm, ReLU -> LSTM -> LayerNorm

    The context is the LSTM's output and the pooled slots. Op, blend and value depend on the
    context; a slot is scored given the context and the op, a candidate given the context and the
    slot. Permuting slots or blueprints permutes the policy, and absent slots change nothing.
    """

    def _build(self, config: NetworkConfig) -> None:
        self.layout = SetLayout(config.num_slots, config.num_blueprints)
        own, width = config.embedding_dim, config.resolved_head_width
        # No bias, so that candidates that do not fit, which are all zeros, stay zero.
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
        self._build_lstm(config)
        context = config.lstm_hidden_dim + 2 * own
        self.slot_head = PointerHead(own, context + config.num_ops, width)
        self.blueprint_head = PointerHead(own, context + own, width)
        self.blend_head = make_head(context, width, config.num_blends)
        self.op_head = make_head(context, width, config.num_ops)
        self.value_head = make_head(context, width, 1)

    def embed(self, observations: Tensor) -> tuple[Tensor, Any]:
        """Inputs of the LSTM; the pooled slots, the slots and their candidates."""
        run, slots, candidates = self.layout.split(observations)
        encoded = self.candidate_net(candidates)
        fitting = _pooled(encoded, candidates[..., FITS])
        embedded = self.slot_net(torch.cat([slots, fitting], dim=-1))
        pooled = _pooled(embedded * slots[..., PRESENT, None], slots[..., PRESENT])
        inputs = self.feature_net(torch.cat([run, pooled], dim=-1))
        return inputs, (pooled, embedded, encoded)

    def _features(self, recurred: Recurred) -> Encoded:
        output, (pooled, slots, candidates) = recurred
        return Encoded(torch.cat([self.lstm_norm(output), pooled], dim=-1), slots, candidates)

    def _logits(self, name: str, features: Encoded, drawn: dict[str, Tensor]) -> Tensor:
        context = features.context
        if name == "slot":
            op = F.one_hot(drawn["op"], self.config.num_ops).to(context.dtype)
            return self.slot_head(features.slots, torch.cat([context, op], dim=-1))
        if name == "blueprint":
            slot = pick(features.slots, drawn["slot"])
            own = pick(features.candidates, drawn["slot"])
            return self.blueprint_head(own, torch.cat([context, slot], dim=-1))
        return self.head(name)(context)

    def _value_of(self, features: Encoded) -> Tensor:
        return super()._value_of(features.context)

    def fitted(self, num_slots: int, num_blueprints: int) -> "SetActorCritic":
        """This policy for other numbers of slots and blueprints, with the same parameters."""
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
    """A network of the kind in the config."""
    kind = SetActorCritic if config.kind == "set" else FactoredRecurrentActorCritic
    return kind(config, key)


def _pooled(items: Tensor, counted: Tensor) -> Tensor:
    """Mean and maximum [..., 2 E] of the items [..., n, E] where `counted` [..., n] is 1, else 0.

    Items must be at least 0, and 0 where `counted` is 0.
    """
    number = counted.sum(dim=-1, keepdim=True).clamp(min=1.0)
    return torch.cat([items.sum(dim=-2) / number, items.amax(dim=-2)], dim=-1)
