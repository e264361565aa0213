"""The policy and its value function: an LSTM with four action heads and a value head."""

import math
from collections.abc import Callable, Mapping
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


@dataclass(frozen=True, kw_only=True)
class NetworkSizes:
    """Kind and sizes of the network, as far as users choose them."""

    # 'flat': for one number of slots and blueprints. 'set': for any number of both.
    kind: Kind = "flat"
    # Width of the features that enter the LSTM, width and number of layers of the LSTM.
    feature_dim: int = constants.FEATURE_DIM
    lstm_hidden_dim: int = constants.LSTM_HIDDEN_DIM
    lstm_layers: int = 1
    # Width of the embedding of a slot or candidate; kind 'set' only.
    embedding_dim: int = constants.EMBEDDING_DIM
    # Hidden width of each head; None: half of the LSTM, at least MIN_HEAD_WIDTH.
    head_width: int | None = None


@dataclass(frozen=True)
class NetworkConfig(NetworkSizes):
    """Sizes and initial scales of the network; the first three depend on the environments."""

    observation_dim: int
    num_slots: int
    num_blueprints: int
    num_blends: int = len(BLEND_NAMES)
    num_ops: int = NUM_OPS
    # Orthogonal gain of the last layers: small for the actor, so that it starts near uniform.
    actor_gain: float = 0.01
    critic_gain: float = 1.0

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if name in ("num_ops", "kind", "head_width", "actor_gain", "critic_gain"):
                continue
            most = MOST_LAYERS if name == "lstm_layers" else MOST_WIDTH
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

    An action is drawn head by head from masked distributions: first the op, then a slot that the
    op allows, a blueprint that fits the slot, and a blend. A head that the op does not use is not
    drawn: index 0, log-prob 0, entropy 0. Observations are [B, D] (one step) or [B, T, D]; all
    other arguments and results have the same leading axes, heads last in the order of HEAD_NAMES.
    A hidden state is (h, c), each [layers, B, H].

    Initial parameters are a function of `key`; global random state is neither read nor changed.
    """

    def __init__(self, config: NetworkConfig, key: int = 0) -> None:
        super().__init__()
        self.config = config
        self.validate_masks = True
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
        self._build_lstm(config)
        self.slot_head: nn.Module = make_head(hidden, width, config.num_slots)
        self.blueprint_head: nn.Module = make_head(hidden, width, config.num_blueprints)
        self.blend_head = make_head(hidden, width, config.num_blends)
        self.op_head = make_head(hidden, width, config.num_ops)
        self.value_head = make_head(hidden, width, 1)

    def _build_lstm(self, config: NetworkConfig) -> None:
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
                # Gates are stacked i, f, g, o; an open forget gate helps to learn long memory.
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
        """Set the initial bias of ops by name."""
        with torch.no_grad():
            for name, logit in logits.items():
                _last_layer(self.op_head).bias[LifecycleOp[name]] = logit

    @property
    def parts(self) -> "Parts":
        return Parts(self.embed, self.act, self.score)

    def encode(self, observations: Tensor, hidden: Hidden) -> tuple[Any, Hidden]:
        """Features for the heads, and the hidden state after the last step."""
        recurred, hidden = self._recur(observations, hidden, self.parts)
        return self._features(recurred), hidden

    def _recur(
        self, observations: Tensor, hidden: Hidden, parts: "Parts"
    ) -> tuple["Recurred", Hidden]:
        self._check_shapes(observations, hidden)
        inputs, rest = parts.embed(observations)
        if inputs.dim() == 2:
            output, hidden = self.lstm(inputs.unsqueeze(1), hidden)
            output = output.squeeze(1)
        else:
            output, hidden = self.lstm(inputs, hidden)
        return (output, rest), hidden

    def embed(self, observations: Tensor) -> tuple[Tensor, Any]:
        """Inputs of the LSTM, and what the heads read besides its output."""
        return self.feature_net(observations), None

    def _features(self, recurred: "Recurred") -> Any:
        """What the heads read."""
        return self.lstm_norm(recurred[0])

    def _check_shapes(self, observations: Tensor, hidden: Hidden) -> None:
        width = self.config.observation_dim
        if observations.dim() not in (2, 3) or observations.shape[-1] != width:
            raise ConfigError(
                f"observations must be [batch, {width}] or [batch, time, {width}], "
                f"got {list(observations.shape)}"
            )
        expected = (self.config.lstm_layers, len(observations), self.config.lstm_hidden_dim)
        if any(state.shape != expected for state in hidden):
            raise ConfigError(
                f"the hidden state must be two arrays {list(expected)} (layers, batch, width), "
                f"got {[list(state.shape) for state in hidden]}"
            )

    def decide(
        self,
        features: Any,
        masks: MaskTensors,
        actions: Tensor | None = None,
        draws: Tensor | None = None,
    ) -> tuple[Tensor, Tensor, tuple[MaskedCategorical, ...], Tensor]:
        """Score `actions`, draw actions with `draws`, or with neither take the most probable.

        `draws` are uniform in [0, 1), one per head. Acting and learning share this function.
        Returns actions, log-probs, distributions and relevance, in the order of HEAD_NAMES.
        """
        distributions: dict[str, MaskedCategorical] = {}
        drawn: dict[str, Tensor] = {}
        given = (features, distributions, drawn, actions, draws)
        op = self._choose("op", masks.op, *given)
        relevant = head_relevance(op)
        # The mask of a head that is not relevant may be empty; its result is not used.
        ignored = ~relevant
        no_slot, no_blueprint, no_blend, _ = ignored.unsqueeze(-1).unbind(-2)
        slot = self._choose("slot", pick(masks.slot, op) | no_slot, *given)
        self._choose("blueprint", pick(masks.blueprint, slot) | no_blueprint, *given)
        self._choose("blend", masks.blend | no_blend, *given)

        log_probs = [distributions[name].log_prob(drawn[name]) for name in HEAD_NAMES]
        return (
            torch.stack([drawn[name] for name in HEAD_NAMES], dim=-1).masked_fill(ignored, 0),
            torch.stack(log_probs, dim=-1).masked_fill(ignored, 0.0),
            tuple(distributions[name] for name in HEAD_NAMES),
            relevant,
        )

    def _choose(
        self,
        name: str,
        mask: Tensor,
        features: Any,
        distributions: dict[str, MaskedCategorical],
        drawn: dict[str, Tensor],
        actions: Tensor | None,
        draws: Tensor | None,
    ) -> Tensor:
        """Add a head to `distributions` and its choice to `drawn`."""
        logits = self._logits(name, features, drawn)
        distribution = MaskedCategorical(logits, mask, validate=self.validate_masks)
        index = HEAD_NAMES.index(name)
        if actions is not None:
            chosen = actions[..., index]
        elif draws is not None:
            chosen = distribution.icdf(draws[..., index])
        else:
            chosen = distribution.mode()
        distributions[name], drawn[name] = distribution, chosen
        return chosen

    def _logits(self, name: str, features: Any, drawn: dict[str, Tensor]) -> Tensor:
        """Logits of one head; `drawn` are the choices of earlier heads, which are ignored here."""
        return self.head(name)(features)

    def get_action(
        self,
        observations: Tensor,
        hidden: Hidden,
        masks: MaskTensors,
        draws: Tensor | None,
        parts: "Parts | None" = None,
    ) -> tuple[Tensor, Tensor, Tensor, Hidden]:
        """Actions, log-probs (both [..., 4]), values and the next hidden state."""
        parts = parts or self.parts
        recurred, hidden = self._recur(observations, hidden, parts)
        return *parts.act(recurred, masks, draws), hidden

    def act(
        self, recurred: "Recurred", masks: MaskTensors, draws: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Actions, log-probs and values."""
        features = self._features(recurred)
        actions, log_probs, _, _ = self.decide(features, masks, draws=draws)
        return actions, log_probs, self._value_of(features)

    def evaluate_actions(
        self,
        observations: Tensor,
        actions: Tensor,
        masks: MaskTensors,
        hidden: Hidden,
        parts: "Parts | None" = None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Log-probs and normalised entropies (both [..., 4]) of given actions, and values."""
        parts = parts or self.parts
        recurred, _ = self._recur(observations, hidden, parts)
        return parts.score(recurred, masks, actions)

    def score(
        self, recurred: "Recurred", masks: MaskTensors, actions: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Log-probs and entropies of given actions, and values."""
        features = self._features(recurred)
        _, log_probs, distributions, relevant = self.decide(features, masks, actions=actions)
        entropies = torch.stack([d.entropy() for d in distributions], dim=-1)
        return log_probs, entropies.masked_fill(~relevant, 0.0), self._value_of(features)

    def value(self, observations: Tensor, hidden: Hidden) -> Tensor:
        """V of a state without an action, such as the one after a truncated step."""
        features, _ = self.encode(observations, hidden)
        return self._value_of(features)

    def _value_of(self, features: Any) -> Tensor:
        return self.value_head(features).squeeze(-1)


# The output of the LSTM, and what the heads read besides.
Recurred = tuple[Tensor, Any]


@dataclass(frozen=True)
class Parts:
    """The functions of a network before its LSTM (`embed`) and after it, compiled or not. The LSTM
    stays out of compiled graphs: Dynamo does not trace it."""

    embed: Callable[[Tensor], tuple[Tensor, Any]]
    act: Callable[[Recurred, MaskTensors, Tensor | None], tuple[Tensor, Tensor, Tensor]]
    score: Callable[[Recurred, MaskTensors, Tensor], tuple[Tensor, Tensor, Tensor]]


def make_head(inputs: int, width: int, outputs: int) -> nn.Sequential:
    """Linear, ReLU, Linear."""
    return nn.Sequential(nn.Linear(inputs, width), nn.ReLU(), nn.Linear(width, outputs))


def _last_layer(head: nn.Module) -> nn.Linear:
    return [module for module in head.modules() if isinstance(module, nn.Linear)][-1]


def pick(rows: Tensor, choice: Tensor) -> Tensor:
    """rows [..., k, *rest] and choice [...] -> what was chosen of the k, [..., *rest]."""
    flat = rows.flatten(0, choice.dim() - 1)
    every = torch.arange(len(flat), device=rows.device)
    return flat[every, choice.flatten()].unflatten(0, choice.shape)
