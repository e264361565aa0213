import pytest
import torch
from torch import nn

import helpers
from esper.growth.blueprints.catalogue import (
    BlueprintCatalogue,
    BlueprintSpec,
    OutputSpec,
    count_params,
    default_catalogue,
    seed_costs,
)
from esper.growth.blueprints.modules import group_count, head_count
from esper.growth.grown_module import GrownModule, keyed
from esper.growth.hosts import TransformerHost
from esper.leyline import ConfigError, InjectionSpec, SeedStage

CATALOGUE = default_catalogue()


def fitting(topology: str) -> list[str]:
    """Those that need to know nothing but a slot's width; bypasses have tests of their own."""
    return helpers.fitting(topology, ("residual", "branch"))


OUTPUT = OutputSpec(outputs=10, per_position=False)
# Every width that a host of ours has at a slot.
CNN_WIDTHS = (2, 4, 8, 16, 32, 64, 128)
SEQUENCE_WIDTHS = (16, 32, 64, 384)

MIXING = ("attention", "flex_attention", "transformer_block", "transformer_blocks")

MAPS = {"cnn1d": (6,), "cnn": (4, 4), "cnn3d": (3, 3, 3)}


def site(topology: str, width: int, *, causal: bool = False) -> InjectionSpec:
    maps = {name: (width, *space) for name, space in MAPS.items()}
    shape = {**maps, "transformer": (6, width), "mlp": (width,)}[topology]
    return InjectionSpec("r0c0", width, 1.0, "", topology, shape, causal=causal)


def cases() -> list[tuple[str, str, int]]:
    widths: dict[str, tuple[int, ...]] = {
        "cnn": CNN_WIDTHS,
        "transformer": SEQUENCE_WIDTHS,
        "mlp": SEQUENCE_WIDTHS,
        # No host of ours has these.
        "cnn1d": (4, 32),
        "cnn3d": (4, 32),
    }
    return [(t, name, w) for t in widths for name in fitting(t) for w in widths[t]]


def build(topology: str, name: str, width: int, *, causal: bool = False) -> nn.Module:
    with keyed(width):
        return CATALOGUE[CATALOGUE.index(name)].build(site(topology, width, causal=causal), OUTPUT)


def features(topology: str, width: int) -> torch.Tensor:
    """Like what a host has after normalisation and ReLU."""
    with keyed(7):
        return torch.randn(16, *site(topology, width).shape).relu() + 0.01


def test_the_thirteen_of_the_reference_in_their_order_then_those_of_our_own() -> None:
    assert CATALOGUE.names == (
        "noop",
        "conv_light",
        "attention",
        "norm",
        "depthwise",
        "bottleneck",
        "conv_small",
        "conv_heavy",
        "lora",
        "lora_large",
        "mlp_small",
        "mlp",
        "flex_attention",
        "branch",
        "transformer_block",
        "transformer_blocks",
        "widen_half",
        "widen_double",
    )
    assert set(fitting("cnn")) == {
        "conv_light",
        "attention",
        "norm",
        "depthwise",
        "bottleneck",
        "conv_small",
        "conv_heavy",
        "branch",
    }
    assert fitting("cnn1d") == fitting("cnn3d") == fitting("cnn")
    assert set(fitting("mlp")) == {"norm", "lora", "lora_large", "mlp_small", "mlp", "branch"}
    assert set(fitting("transformer")) == set(fitting("mlp")) | set(MIXING)


@pytest.mark.parametrize(
    ("name", "counts"),
    [
        ("norm", (17, 33, 65, 129)),
        ("attention", (40, 144, 544, 2112)),
        ("depthwise", (152, 432, 1376, 4800)),
        ("bottleneck", (720, 864, 1152, 4480)),
        ("conv_small", (80, 288, 1088, 4224)),
        ("conv_light", (592, 2336, 9280, 36992)),
        ("conv_heavy", (1184, 4672, 18560, 73984)),
    ],
)
def test_parameter_counts_of_cnn_blueprints(name: str, counts: tuple[int, ...]) -> None:
    assert tuple(count_params(build("cnn", name, w)) for w in (8, 16, 32, 64)) == counts


@pytest.mark.parametrize(
    ("name", "count"),
    [
        ("norm", 769),
        ("lora", 6144),
        ("lora_large", 24576),
        ("attention", 591360),
        ("flex_attention", 591360),
        ("mlp_small", 590976),
        ("mlp", 1181568),
        ("transformer_block", 1774464),
        ("transformer_blocks", 5323392),
    ],
)
def test_parameter_counts_of_transformer_blueprints(name: str, count: int) -> None:
    assert count_params(build("transformer", name, 384)) == count


def test_the_branch_of_the_pilot_has_490_parameters() -> None:
    assert count_params(build("cnn", "branch", 2)) == 490


@pytest.mark.parametrize(("topology", "name", "width"), cases())
def test_identity_at_birth(topology: str, name: str, width: int) -> None:
    x = features(topology, width)
    delta = build(topology, name, width)(x)
    assert delta.shape == ((16, 10) if name == "branch" else x.shape)
    assert 0.0 < delta.norm() < 1e-3 * x.norm()


@pytest.mark.parametrize(("topology", "name", "width"), cases())
def test_first_gradients_reach_every_parameter_and_are_bounded(
    topology: str, name: str, width: int
) -> None:
    seed, x = build(topology, name, width), features(topology, width)
    with keyed(1):
        target = torch.randn_like(x if name != "branch" else torch.zeros(16, 10))
    (seed(x) * target).mean().backward()
    for label, parameter in seed.named_parameters():
        assert parameter.grad is not None, label
        assert 0.0 < float(parameter.grad.norm()) < 10.0, label


@pytest.mark.parametrize(("topology", "name", "width"), [c for c in cases() if c[2] <= 64])
def test_fifty_steps_lower_a_toy_loss(topology: str, name: str, width: int) -> None:
    seed, x = build(topology, name, width), features(topology, width)
    with keyed(2):
        mix = torch.randn(width)
    if name == "branch":
        target = torch.nn.functional.one_hot(torch.arange(16) % 10, 10).float()
        base = torch.zeros_like(target)
    else:
        # Per-channel gains and the features' mean: something every kind of seed can move towards.
        gains = mix.view(1, -1, *[1] * len(MAPS[topology])) if topology in MAPS else mix
        target, base = x * (1 + 0.3 * torch.tanh(gains)) - 0.3 * x.mean(), x
    optimizer = torch.optim.Adam(seed.parameters(), lr=1e-2)
    losses = []
    for _ in range(50):
        optimizer.zero_grad()
        loss = (base + seed(x) - target).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.97 * losses[0]


@pytest.mark.parametrize("name", fitting("cnn"))
@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_a_seed_survives_a_steady_pull_in_one_direction(name: str, sign: float) -> None:
    """In isolation the loss does not answer to the seed: its gradient can pull for a long time."""
    seed, x = build("cnn", name, 8), features("cnn", 8)
    optimizer = torch.optim.Adam(seed.parameters(), lr=1e-2)
    for _ in range(60):
        optimizer.zero_grad()
        (sign * seed(x)).mean().backward()
        optimizer.step()
    optimizer.zero_grad()
    (sign * seed(x)).mean().backward()
    for label, parameter in seed.named_parameters():
        assert parameter.grad is not None
        assert float(parameter.grad.norm()) > 0.0, label


def test_group_count_keeps_groups_wide() -> None:
    assert [group_count(c) for c in (1, 2, 8, 16, 24, 32, 64, 128, 512)] == [
        *(1, 1, 1, 1, 1, 2, 4, 8, 32),
    ]


@pytest.mark.parametrize("name", MIXING)
@pytest.mark.parametrize("causal", [True, False])
def test_seeds_that_mix_positions_look_ahead_only_where_the_host_does(
    name: str, causal: bool
) -> None:
    seed = build("transformer", name, 16, causal=causal)
    with torch.no_grad(), keyed(0):
        for p in seed.parameters():
            p.add_(torch.randn_like(p))
        x = torch.randn(2, 6, 16)
        changed = x.clone()
        changed[:, 4:] = torch.randn(2, 2, 16)
    before, after = seed(x), seed(changed)
    assert torch.equal(before[:, :4], after[:, :4]) == causal
    assert not torch.allclose(before[:, 4:], after[:, 4:])


def test_heads_of_a_block_divide_every_width() -> None:
    assert [head_count(c) for c in (1, 7, 16, 18, 48, 384, 768)] == [1, 1, 4, 3, 4, 6, 12]


def deep(layers: int) -> TransformerHost:
    with keyed(layers):
        return TransformerHost(20, 16, 4, layers, block_size=6, dropout=0.0)


@pytest.mark.parametrize(("name", "layers"), [("transformer_block", 1), ("transformer_blocks", 3)])
def test_a_host_with_blocks_grown_is_the_deeper_host(name: str, layers: int) -> None:
    """Also after a block, so that the seed reads what the deeper host's blocks read."""
    whole, tokens = deep(2 + layers), torch.randint(0, 20, (3, 6))
    network = GrownModule.wrap(deep(2), ["blocks.1"], tokens, CATALOGUE)
    network.germinate(0, CATALOGUE.index(name), 0, key=1)
    network.set_blend(0, SeedStage.FOSSILIZED, 1.0)
    seed = network.slot(0).seed
    assert seed is not None
    network.host.load_state_dict(
        {key: value for key, value in whole.state_dict().items() if key in deep(2).state_dict()}
    )
    for grown, block in zip(seed.blocks, whole.blocks[2:], strict=True):  # type: ignore[arg-type]
        grown.load_state_dict(block.state_dict())
    expected = whole.double()(tokens)
    assert torch.allclose(network.double()(tokens), expected, rtol=0, atol=1e-12)
    assert expected.std() > 0.01

    _, params, macs = seed_costs(CATALOGUE, network.sites, network.output)
    index = CATALOGUE.index(name)
    assert count_params(network.host) + params[0, index] == count_params(whole)
    deeper = GrownModule.wrap(whole, ["blocks.1"], tokens, CATALOGUE)
    assert network.host_macs + macs[0, index] == deeper.host_macs


@pytest.mark.parametrize("causal", [True, False])
def test_flex_attention_equals_attention_with_the_bias_written_out(causal: bool) -> None:
    seed = build("transformer", "flex_attention", 16, causal=causal)
    x = torch.randn(2, 5, 16)
    q, k, v = (
        part.reshape(2, 5, 4, 4).transpose(1, 2)
        for part in seed.qkv(x).chunk(3, dim=-1)  # type: ignore[operator]
    )
    scores = q @ k.transpose(-1, -2) / 2.0
    for head in range(4):
        for i in range(5):
            for j in range(5):
                hidden = causal and j > i
                scores[:, head, i, j] += (
                    -torch.inf if hidden else -(2.0 ** (-2.0 * (head + 1))) * abs(i - j)
                )
    expected = seed.proj((scores.softmax(-1) @ v).transpose(1, 2).reshape(2, 5, 16))  # type: ignore[operator]
    assert torch.allclose(seed(x), expected, atol=1e-7)


@pytest.mark.parametrize("name", fitting("cnn1d"))
def test_seeds_for_maps_of_one_dimension_are_those_of_flat_images(name: str) -> None:
    """On images of one row a seed of two dimensions, of which only the middle row of each kernel
    can be seen, does what the seed of one dimension with those weights does."""
    flat, image = build("cnn1d", name, 8), build("cnn", name, 8)
    with torch.no_grad(), keyed(0):
        for parameter in flat.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
        for one, two in zip(flat.parameters(), image.parameters(), strict=True):
            if two.dim() == 4:
                two.zero_()
                two[:, :, two.shape[2] // 2] = one
            elif one.shape == two.shape:
                two.copy_(one)
            else:  # the branch's last layer sees pooled rows twice
                pooled = one.view(10, -1, 2)
                two.copy_(torch.stack([pooled, torch.zeros_like(pooled)], 2).flatten(1))
    x = torch.randn(3, 8, 6)
    expected = flat(x)
    assert torch.allclose(expected, image(x[:, :, None]).reshape(expected.shape), atol=1e-5)


def test_what_does_not_fit_is_refused_by_name() -> None:
    light = CATALOGUE[CATALOGUE.index("conv_light")]
    with pytest.raises(ConfigError, match=r"conv_light.*serves cnn.*slot is transformer"):
        light.build(site("transformer", 16), OUTPUT)
    with pytest.raises(ConfigError, match="4 heads divide"):
        build("transformer", "attention", 18)
    with pytest.raises(ConfigError, match="needs a host whose output"):
        CATALOGUE[CATALOGUE.index("branch")].build(site("cnn", 8), None)
    with pytest.raises(ConfigError, match="has 6 positions and the host's output has 5"):
        CATALOGUE[CATALOGUE.index("branch")].build(
            site("transformer", 8), OutputSpec(10, True, positions=5)
        )
    with pytest.raises(ConfigError, match="output has positions"):
        CATALOGUE[CATALOGUE.index("branch")].build(site("cnn", 8), OutputSpec(10, True))
    with pytest.raises(ConfigError, match=r"no blueprint 'conv'.*conv_light"):
        CATALOGUE.index("conv")


def test_a_blueprint_can_be_added_but_not_twice() -> None:
    mine = BlueprintSpec("mine", "residual", {"mlp": lambda c: nn.Linear(c, c)}, "mine")
    longer = CATALOGUE.with_blueprint(mine)
    assert longer.index("mine") == len(CATALOGUE)
    assert len(CATALOGUE) + 1 == len(longer)
    with pytest.raises(ConfigError, match="distinct"):
        BlueprintCatalogue((mine, mine))
