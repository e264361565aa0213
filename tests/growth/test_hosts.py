import copy

import pytest
import torch

from esper.growth.blueprints.catalogue import count_params
from esper.growth.grown_module import keyed
from esper.growth.hosts import CNNHost, MLPHost, TransformerHost
from esper.leyline import ConfigError
from helpers import grads, loss_of


@pytest.mark.parametrize(
    ("settings", "params"),
    [
        ({"base_channels": 2, "in_channels": 1}, 496),
        ({"base_channels": 3, "in_channels": 1}, 1009),
        ({"base_channels": 8}, 6418),
        ({"base_channels": 8, "n_blocks": 5}, 99922),
        ({"base_channels": 32, "kernel_size": 1}, 12074),
        ({}, 94762),
    ],
)
def test_cnn_host_sizes(settings: dict[str, int], params: int) -> None:
    assert count_params(CNNHost(**settings)) == params


def test_tied_weights_are_counted_once() -> None:
    with torch.device("meta"):
        assert count_params(TransformerHost()) == 30_044_544


def test_cnn_host_pools_only_where_asked() -> None:
    host = CNNHost(base_channels=2, n_blocks=3, pool_layers=1)
    assert host.blocks(torch.zeros(1, 3, 8, 8)).shape == (1, 8, 4, 4)


def with_relu_first(host: CNNHost) -> CNNHost:
    for block in host.blocks:
        block[2], block[3] = block[3], block[2]  # type: ignore[index]
    return host


def test_pooling_before_the_relu_gives_the_same_bits() -> None:
    with keyed(0):
        host, x = CNNHost(base_channels=4), torch.randn(5, 3, 8, 8)
    other = with_relu_first(copy.deepcopy(host))
    assert torch.equal(host(x), other(x))
    for network in (host, other):
        loss_of(network(x)).backward()
    assert all(torch.equal(g, grads(other)[name]) for name, g in grads(host).items())


@pytest.mark.parametrize(("size", "channels_last"), [(8, False), (28, False), (32, True)])
def test_only_large_images_are_laid_out_channels_last(size: int, channels_last: bool) -> None:
    with keyed(0):
        host, x = CNNHost(base_channels=4), torch.randn(5, 3, size, size)
    seen: list[torch.Tensor] = []
    host.blocks[0].register_forward_hook(lambda module, args, output: seen.append(output))
    output = host(x)
    assert (seen[0].stride(1) == 1) == channels_last
    torch.testing.assert_close(output, host.head(host.blocks(x).mean(dim=(2, 3))))


def test_hosts_refuse_what_cannot_work() -> None:
    with pytest.raises(ConfigError, match="at least 2 blocks"):
        CNNHost(n_blocks=1)
    with pytest.raises(ConfigError, match=r"needs at least one channel, got \(4, 0\)"):
        CNNHost(widths=(4, 0))
    with pytest.raises(ConfigError, match="3 heads do not divide"):
        TransformerHost(16, 8, 3, n_layer=3)
    host = TransformerHost(16, 8, 2, n_layer=3, block_size=4)
    with pytest.raises(ConfigError, match="5 exceeds the block size 4"):
        host(torch.zeros(1, 5, dtype=torch.int64))


def test_transformer_host_looks_back_only_and_ties_its_head() -> None:
    host = TransformerHost(16, 8, 2, n_layer=3, block_size=6).eval()
    tokens = torch.arange(6)[None] % 16
    changed = tokens.clone()
    changed[0, 4] = 9
    assert torch.equal(host(tokens)[:, :4], host(changed)[:, :4])
    assert host.head.weight is host.token.weight
    assert host.slot_modules == ("blocks.0", "blocks.1", "blocks.2")


def test_mlp_host_flattens_its_input() -> None:
    host = MLPHost(64, num_classes=3, hidden=5, n_layers=2)
    assert host(torch.zeros(2, 1, 8, 8)).shape == (2, 3)
    assert host.slot_modules == ("blocks.0", "blocks.1")
