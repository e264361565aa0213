"""The policy and its value function: one LSTM, four heads that are drawn one after the other."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from esper.leyline import BLEND_NAMES, HEAD_NAMES, NUM_OPS, ConfigError, constants, shortened
from esper.leyline.constants import MOST_LAYERS, MOST_WIDTH
from esper.simic.agent.advantages import head_relevance
from esper.simic.agent.types import Hidden, MaskTensors
from esper.tamiyo.policy.masked_categorical import MaskedCategorical


@dataclass(frozen=True)
class NetworkConfig:
    """Sizes and initial scales of the network; the first three come from the problem."""

    observation_dim: int
    num_slots: int
    num_blueprints: int
    num_blends: int = len(BLEND_NAMES)
    num_ops: int = NUM_OPS
    feature_dim: int = constants.FEATURE_DIM
    lstm_hidden_dim: int = constants.LSTM_HIDDEN_DIM
    lstm_layers: int = 1
    # Hidden width of each head; half of the LSTM, but not less than MIN_HEAD_WIDTH, if not given.
    head_width: int | None = None
    # How many numbers the critic sees that the actor does not.
    privileged_dim: int = 0
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
        ):
            value, most = getattr(self, name), MOST_LAYERS if name == "lstm_layers" else MOST_WIDTH
            if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= most:
                raise ConfigError(
                    f"{name} must be a whole number from 1 to {most}, got {shortened(repr(value))}"
                )
        if self.num_ops != NUM_OPS:
            raise ConfigError(f"num_ops must be {NUM_OPS}, one per LifecycleOp, got {self.num_ops}")
        if self.head_width is not None and not 1 <= self.head_width <= MOST_WIDTH:
            raise ConfigError(f"head_width must be from 1 to {MOST_WIDTH}, got {self.head_width}")
        if not 0 <= self.privileged_dim <= MOST_WIDTH:
            raise ConfigError(
                f"privileged_dim must be from 0 to {MOST_WIDTH}, got {self.privileged_dim}"
            )
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
        self.lstm = nn.LSTM(config.feature_dim, hidden, config.lstm_layers, batch_first=True)
        self.lstm_norm = nn.LayerNorm(hidden)
        self.slot_head = _head(hidden, width, config.num_slots)
        self.blueprint_head = _head(hidden, width, config.num_blueprints)
        self.blend_head = _head(hidden, width, config.num_blends)
        self.op_head = _head(hidden, width, config.num_ops)
        self.value_head = _head(hidden + config.privileged_dim, width, 1)

    def _initialize(self) -> None:
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.orthogonal_(module.weight, math.sqrt(2.0))
                nn.init.zeros_(module.bias)
        for name in HEAD_NAMES:
            nn.init.orthogonal_(self.head(name).get_parameter("2.weight"), self.config.actor_gain)
        nn.init.orthogonal_(self.value_head.get_parameter("2.weight"), self.config.critic_gain)
        for name, parameter in self.lstm.named_parameters():
            if "weight" in name:
                nn.init.orthogonal_(parameter)
            else:
                # Gates are stacked i, f, g, o; a forget gate that starts open remembers.
                nn.init.zeros_(parameter)
                quarter = len(parameter) // 4
                nn.init.ones_(parameter[quarter : 2 * quarter])

    def head(self, name: str) -> nn.Sequential:
        """The head called `name`: one of HEAD_NAMES, or 'value'."""
        return getattr(self, f"{name}_head")

    def get_initial_hidden(self, batch: int, device: torch.device | str = "cpu") -> Hidden:
        shape = (self.config.lstm_layers, batch, self.config.lstm_hidden_dim)
        return torch.zeros(shape, device=device), torch.zeros(shape, device=device)

    def encode(self, observations: Tensor, hidden: Hidden) -> tuple[Tensor, Hidden]:
        """Features for the heads, and the hidden state after the last step."""
        self._check_shapes(observations, hidden)
        features = self.feature_net(observations)
        if observations.dim() == 2:
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
        features: Tensor,
        masks: MaskTensors,
        actions: Tensor | None = None,
        draws: Tensor | None = None,
    ) -> tuple[Tensor, Tensor, tuple[MaskedCategorical, ...], Tensor]:
        """Walk the heads in the order in which they are drawn; acting and learning both do.

        With `actions` they are scored, with `draws` (uniform in [0, 1), one per head) they are
        drawn, with neither the most probable are taken. Returns actions, log-probs, the
        distributions and the relevance of the heads, all in the order of HEAD_NAMES.
        """
        heads: dict[str, tuple[MaskedCategorical, Tensor]] = {}

        def choose(name: str, mask: Tensor) -> Tensor:
            distribution = MaskedCategorical(self.head(name)(features), mask)
            index = HEAD_NAMES.index(name)
            if actions is not None:
                chosen = actions[..., index]
            elif draws is not None:
                chosen = distribution.icdf(draws[..., index])
            else:
                chosen = distribution.mode()
            heads[name] = distribution, chosen
            return chosen

        op = choose("op", masks.op)
        relevant = head_relevance(op)
        # Where a head is not relevant its mask may be empty, and what it says is not used.
        ignored = ~relevant
        no_slot, no_blueprint, no_blend, _ = ignored.unsqueeze(-1).unbind(-2)
        slot = choose("slot", _row(masks.slot, op) | no_slot)
        choose("blueprint", _row(masks.blueprint, slot) | no_blueprint)
        choose("blend", masks.blend | no_blend)

        distributions, chosen = zip(*(heads[name] for name in HEAD_NAMES), strict=True)
        log_probs = [d.log_prob(c) for d, c in zip(distributions, chosen, strict=True)]
        return (
            torch.stack(chosen, dim=-1).masked_fill(ignored, 0),
            torch.stack(log_probs, dim=-1).masked_fill(ignored, 0.0),
            distributions,
            relevant,
        )

    def get_action(
        self,
        observations: Tensor,
        hidden: Hidden,
        masks: MaskTensors,
        draws: Tensor | None,
        privileged: Tensor | None = None,
    ) -> tuple[Tensor, Tensor, Tensor, Hidden]:
        """Actions, log-probs (both [..., 4]), values and the next hidden state."""
        features, hidden = self.encode(observations, hidden)
        actions, log_probs, _, _ = self.decide(features, masks, draws=draws)
        return actions, log_probs, self._value_of(features, privileged), hidden

    def evaluate_actions(
        self,
        observations: Tensor,
        actions: Tensor,
        masks: MaskTensors,
        hidden: Hidden,
        privileged: Tensor | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Log-probs and normalised entropies (both [..., 4]) of given actions, and values."""
        features, _ = self.encode(observations, hidden)
        _, log_probs, distributions, relevant = self.decide(features, masks, actions=actions)
        entropies = torch.stack([d.entropy() for d in distributions], dim=-1)
        values = self._value_of(features, privileged)
        return log_probs, entropies.masked_fill(~relevant, 0.0), values

    def value(
        self, observations: Tensor, hidden: Hidden, privileged: Tensor | None = None
    ) -> Tensor:
        """V of a state that nobody acts in, such as the one after a truncated step."""
        features, _ = self.encode(observations, hidden)
        return self._value_of(features, privileged)

    def _value_of(self, features: Tensor, privileged: Tensor | None) -> Tensor:
        return critic_value(self.value_head, features, privileged, self.config.privileged_dim)


def critic_value(
    head: nn.Module, features: Tensor, privileged: Tensor | None, privileged_dim: int
) -> Tensor:
    """V from features [..., H] and what only the critic sees, [..., privileged_dim].

    NaN if the critic is to see something and was not shown it: who only acts needs no value.
    """
    if privileged_dim == 0:
        return head(features).squeeze(-1)
    if privileged is None:
        return features.new_full(features.shape[:-1], math.nan)
    expected = (*features.shape[:-1], privileged_dim)
    if privileged.shape != expected:
        raise ConfigError(
            f"this critic is to see arrays {list(expected)} beside the observations, "
            f"got {list(privileged.shape)}"
        )
    return head(torch.cat([features, privileged], dim=-1)).squeeze(-1)


def _head(inputs: int, width: int, outputs: int) -> nn.Sequential:
    return nn.Sequential(nn.Linear(inputs, width), nn.ReLU(), nn.Linear(width, outputs))


def _row(masks: Tensor, choice: Tensor) -> Tensor:
    """masks [..., k, n] and choice [...] -> the mask of each choice, [..., n]."""
    index = choice[..., None, None].expand(*choice.shape, 1, masks.shape[-1])
    return masks.gather(-2, index).squeeze(-2)
