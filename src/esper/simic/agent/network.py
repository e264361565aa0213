"""The policy and its value function: one LSTM, four heads that are drawn one after the other."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from esper.leyline import (
    BLEND_NAMES,
    HEAD_NAMES,
    NUM_OPS,
    ConfigError,
    LifecycleOp,
    constants,
    shortened,
)
from esper.leyline.constants import MOST_LAYERS, MOST_WIDTH
from esper.simic.agent.advantages import head_relevance
from esper.simic.agent.types import Hidden, MaskTensors
from esper.tamiyo.policy.masked_categorical import MaskedCategorical
from esper.tamiyo.policy.set_features import SetLayout

Kind = Literal["flat", "set"]


@dataclass(frozen=True)
class NetworkConfig:
    """Sizes and initial scales of the network; the first three come from the problem."""

    observation_dim: int
    num_slots: int
    num_blueprints: int
    num_blends: int = len(BLEND_NAMES)
    num_ops: int = NUM_OPS
    # 'flat': one vector in, a head per choice. 'set': slots and candidates, of any number.
    kind: Kind = "flat"
    feature_dim: int = constants.FEATURE_DIM
    lstm_hidden_dim: int = constants.LSTM_HIDDEN_DIM
    lstm_layers: int = 1
    # Width of a slot and of a candidate inside a network over sets.
    embedding_dim: int = constants.EMBEDDING_DIM
    # Hidden width of each head; half of the LSTM, but not less than MIN_HEAD_WIDTH, if not given.
    head_width: int | None = None
    # Orthogonal gain of the last layer: small for the actor, so that it starts near uniform.
    actor_gain: float = constants.ACTOR_GAIN
    critic_gain: float = constants.CRITIC_GAIN

    def __post_init__(self) -> None:
        for name in (
            "observation_dim",
            "num_slots",
            "num_blueprints",
            "num_blends",
            "feature_dim",
            "lstm_hidden_dim",
            "lstm_layers",
            "embedding_dim",
        ):
            value, most = getattr(self, name), MOST_LAYERS if name == "lstm_layers" else MOST_WIDTH
            if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= most:
                raise ConfigError(
                    f"{name} must be a whole number from 1 to {most}, got {shortened(repr(value))}"
                )
        if self.kind not in ("flat", "set"):
            raise ConfigError(f"a network is flat or set, got {shortened(repr(self.kind))}")
        layout = SetLayout(self.num_slots, self.num_blueprints)
        if self.kind == "set" and self.observation_dim != layout.size:
            raise ConfigError(
                f"a network over {self.num_slots} slots and {self.num_blueprints} blueprints takes "
                f"observations of {layout.size} numbers, not {self.observation_dim}"
            )
        if self.num_ops != NUM_OPS:
            raise ConfigError(f"num_ops must be {NUM_OPS}, one per LifecycleOp, got {self.num_ops}")
        if self.head_width is not None and not 1 <= self.head_width <= MOST_WIDTH:
            raise ConfigError(f"head_width must be from 1 to {MOST_WIDTH}, got {self.head_width}")
        if not (self.actor_gain > 0 and self.critic_gain > 0):
            raise ConfigError(
                f"gains must be positive, got actor {self.actor_gain}, critic {self.critic_gain}"
            )

    @property
    def resolved_head_width(self) -> int:
        return self.head_width or max(constants.MIN_HEAD_WIDTH, self.lstm_hidden_dim // 2)


class FactoredRecurrentActorCritic(nn.Module):
    """observation -> Linear, LayerNorm, ReLU -> LSTM -> LayerNorm -> four heads and a value.

    An action is drawn op first, then a slot from those the op allows, then a blueprint from those
    that fit the slot, and a blend, each from its own masked distribution; a head that the op does
    not make relevant is not drawn: index 0, log-prob 0, entropy 0. Observations are [B, D] (one
    step) or [B, T, D]; every other argument and result has the same leading axes, heads last in
    the order of HEAD_NAMES. A hidden state is (h, c), each [layers, B, H].

    The first LayerNorm keeps the LSTM's inputs at one scale whatever the observation, the second
    keeps its output from drifting over an episode, so that heads see one scale at any step.

    Initial parameters are a function of `key`; no global random state is read or changed.
    """

    def __init__(self, config: NetworkConfig, key: int = 0) -> None:
        super().__init__()
        self.config = config
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(key)
            self._build(config)
            self._initialize()

    def _build(self, config: NetworkConfig) -> None:
        hidden, width = config.lstm_hidden_dim, config.resolved_head_width
        self.feature_net = nn.Sequential(
            nn.Linear(config.observation_dim, config.feature_dim),
            nn.LayerNorm(config.feature_dim),
            nn.ReLU(),
        )
        self._build_memory(config)
        self.slot_head: nn.Module = make_head(hidden, width, config.num_slots)
        self.blueprint_head: nn.Module = make_head(hidden, width, config.num_blueprints)
        self.blend_head = make_head(hidden, width, config.num_blends)
        self.op_head = make_head(hidden, width, config.num_ops)
        self.value_head = make_head(hidden, width, 1)

    def _build_memory(self, config: NetworkConfig) -> None:
        hidden = config.lstm_hidden_dim
        self.lstm = nn.LSTM(config.feature_dim, hidden, config.lstm_layers, batch_first=True)
        self.lstm_norm = nn.LayerNorm(hidden)

    def _initialize(self) -> None:
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.orthogonal_(module.weight, math.sqrt(2.0))
                if module.bias is not None:
                    nn.init.zeros_(module.bias)
        for name in HEAD_NAMES:
            nn.init.orthogonal_(_last_layer(self.head(name)).weight, self.config.actor_gain)
        nn.init.orthogonal_(_last_layer(self.value_head).weight, self.config.critic_gain)
        for name, parameter in self.lstm.named_parameters():
            if "weight" in name:
                nn.init.orthogonal_(parameter)
            else:
                # Gates are stacked i, f, g, o; a forget gate that starts open remembers.
                nn.init.zeros_(parameter)
                quarter = len(parameter) // 4
                nn.init.ones_(parameter[quarter : 2 * quarter])

    def head(self, name: str) -> nn.Module:
        """The head called `name`: one of HEAD_NAMES, or 'value'."""
        return getattr(self, f"{name}_head")

    def get_initial_hidden(self, batch: int, device: torch.device | str = "cpu") -> Hidden:
        shape = (self.config.lstm_layers, batch, self.config.lstm_hidden_dim)
        return torch.zeros(shape, device=device), torch.zeros(shape, device=device)

    def bias_ops(self, logits: Mapping[str, float]) -> None:
        """Let ops start with these logits, by name."""
        with torch.no_grad():
            for name, logit in logits.items():
                _last_layer(self.op_head).bias[LifecycleOp[name]] = logit

    def encode(self, observations: Tensor, hidden: Hidden) -> tuple[Any, Hidden]:
        """Features for the heads, and the hidden state after the last step."""
        self._check_shapes(observations, hidden)
        return self._remember(observations, hidden)

    def _remember(self, seen: Tensor, hidden: Hidden) -> tuple[Tensor, Hidden]:
        """What is seen [..., D], and through the LSTM: [..., H]."""
        features = self.feature_net(seen)
        if seen.dim() == 2:
            output, hidden = self.lstm(features.unsqueeze(1), hidden)
            output = output.squeeze(1)
        else:
            output, hidden = self.lstm(features, hidden)
        return self.lstm_norm(output), hidden

    def _check_shapes(self, observations: Tensor, hidden: Hidden) -> None:
        width = self.config.observation_dim
        if observations.dim() not in (2, 3) or observations.shape[-1] != width:
            raise ConfigError(
                f"observations must be [batch, {width}] or [batch, time, {width}], "
                f"got {list(observations.shape)}"
            )
        expected = (self.config.lstm_layers, len(observations), self.config.lstm_hidden_dim)
        if any(part.shape != expected for part in hidden):
            raise ConfigError(
                f"the hidden state must be two arrays {list(expected)} (layers, batch, width), "
                f"got {[list(part.shape) for part in hidden]}"
            )

    def decide(
        self,
        features: Any,
        masks: MaskTensors,
        actions: Tensor | None = None,
        draws: Tensor | None = None,
    ) -> tuple[Tensor, Tensor, tuple[MaskedCategorical, ...], Tensor]:
        """Walk the heads in the order in which they are drawn; acting and learning both do.

        With `actions` they are scored, with `draws` (uniform in [0, 1), one per head) they are
        drawn, with neither the most probable are taken. Returns actions, log-probs, the
        distributions and the relevance of the heads, all in the order of HEAD_NAMES.
        """
        distributions: dict[str, MaskedCategorical] = {}
        drawn: dict[str, Tensor] = {}

        def choose(name: str, mask: Tensor) -> Tensor:
            distribution = MaskedCategorical(self._logits(name, features, drawn), mask)
            index = HEAD_NAMES.index(name)
            if actions is not None:
                chosen = actions[..., index]
            elif draws is not None:
                chosen = distribution.icdf(draws[..., index])
            else:
                chosen = distribution.mode()
            distributions[name], drawn[name] = distribution, chosen
            return chosen

        op = choose("op", masks.op)
        relevant = head_relevance(op)
        # Where a head is not relevant its mask may be empty, and what it says is not used.
        ignored = ~relevant
        no_slot, no_blueprint, no_blend, _ = ignored.unsqueeze(-1).unbind(-2)
        slot = choose("slot", pick(masks.slot, op) | no_slot)
        choose("blueprint", pick(masks.blueprint, slot) | no_blueprint)
        choose("blend", masks.blend | no_blend)

        log_probs = [distributions[name].log_prob(drawn[name]) for name in HEAD_NAMES]
        return (
            torch.stack([drawn[name] for name in HEAD_NAMES], dim=-1).masked_fill(ignored, 0),
            torch.stack(log_probs, dim=-1).masked_fill(ignored, 0.0),
            tuple(distributions[name] for name in HEAD_NAMES),
            relevant,
        )

    def _logits(self, name: str, features: Any, drawn: dict[str, Tensor]) -> Tensor:
        """Of one head; `drawn` are the choices of those before it. Here no head sees them."""
        return self.head(name)(features)

    def get_action(
        self, observations: Tensor, hidden: Hidden, masks: MaskTensors, draws: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor, Hidden]:
        """Actions, log-probs (both [..., 4]), values and the next hidden state."""
        features, hidden = self.encode(observations, hidden)
        actions, log_probs, _, _ = self.decide(features, masks, draws=draws)
        return actions, log_probs, self._value_of(features), hidden

    def evaluate_actions(
        self, observations: Tensor, actions: Tensor, masks: MaskTensors, hidden: Hidden
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Log-probs and normalised entropies (both [..., 4]) of given actions, and values."""
        features, _ = self.encode(observations, hidden)
        _, log_probs, distributions, relevant = self.decide(features, masks, actions=actions)
        entropies = torch.stack([d.entropy() for d in distributions], dim=-1)
        return log_probs, entropies.masked_fill(~relevant, 0.0), self._value_of(features)

    def value(self, observations: Tensor, hidden: Hidden) -> Tensor:
        """V of a state that nobody acts in, such as the one after a truncated step."""
        features, _ = self.encode(observations, hidden)
        return self._value_of(features)

    def _value_of(self, features: Any) -> Tensor:
        return self.value_head(features).squeeze(-1)


def make_head(inputs: int, width: int, outputs: int) -> nn.Sequential:
    """Linear, ReLU, Linear."""
    return nn.Sequential(nn.Linear(inputs, width), nn.ReLU(), nn.Linear(width, outputs))


def _last_layer(head: nn.Module) -> nn.Linear:
    return [module for module in head.modules() if isinstance(module, nn.Linear)][-1]


def pick(rows: Tensor, choice: Tensor) -> Tensor:
    """rows [..., k, n] and choice [...] -> the row of each choice, [..., n]."""
    index = choice[..., None, None].expand(*choice.shape, 1, rows.shape[-1])
    return rows.gather(-2, index).squeeze(-2)
