import re

import pytest
import torch
from torch import Tensor, nn

from architectures import ARCHITECTURES, GRUClassifier, ResNet20, TinyTransformer
from esper.growth.blueprints.catalogue import count_params, seed_costs
from esper.growth.grown_module import GrownModule
from esper.growth.sites import evaluating
from esper.growth.slot_choice import list_slots
from esper.leyline import ConfigError

RESNET_INPUT = torch.zeros(3, 3, 8, 8)


def test_listing_shows_name_shape_and_cost_in_order_of_use() -> None:
    slots = {slot.name: slot for slot in list_slots(ResNet20(), RESNET_INPUT)}
    assert slots["layer1"].shape == (4, 8, 8)
    assert slots["layer3"].shape == (16, 2, 2)
    assert slots["layer2"].topology == "cnn"
    assert slots["fc"].topology == "mlp"
    assert slots["stem.0"].macs == 3 * 4 * 9 * 64
    assert slots["stem.0"].params == 3 * 4 * 9
    order = list(slots)
    assert order.index("stem") < order.index("layer1") < order.index("layer2") < order.index("fc")
    assert slots["layer1.0.relu"].calls == 2


def test_listing_prints_as_a_table() -> None:
    text = str(list_slots(ResNet20(), RESNET_INPUT))
    header, first, *_ = text.splitlines()
    assert header.split() == [
        "name",
        "module",
        "shape",
        "layout",
        "fits",
        "params",
        "multiply-adds",
        "calls",
        "widening",
    ]
    assert re.match(
        r"stem\.0 +Conv2d +4x8x8 +BCHW +cnn +108 +6,912 +1 +second path: read elsewhere, too", first
    )


def test_probing_leaves_no_trace() -> None:
    model = ResNet20().train()
    model.layer2.eval()
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    list_slots(model, torch.randn(3, 3, 8, 8))
    assert all(torch.equal(t, state[n]) for n, t in model.state_dict().items())
    assert model.training
    assert not model.layer2.training
    assert not any(module._forward_hooks for module in model.modules())


def names(model: nn.Module, slots: object, example: object) -> list[str]:
    return [s.module for s in GrownModule.wrap(model, slots, example).sites]  # type: ignore[arg-type]


def test_slots_by_name_regular_expression_and_predicate() -> None:
    model = ResNet20()
    three = ["layer1", "layer2", "layer3"]
    assert names(model, ["layer3", "layer1", "layer2"], RESNET_INPUT) == three
    assert names(model, r"layer\d", RESNET_INPUT) == three
    assert names(model, lambda n, m: n in three and len(m) == 3, RESNET_INPUT) == three


def test_a_list_also_takes_the_last_part_of_names() -> None:
    model = ResNet20()
    first = [f"layer{i}.{j}.conv1" for i in (1, 2, 3) for j in range(3)]
    assert names(model, ["conv1"], RESNET_INPUT) == first
    assert names(model, ["1.conv1", "fc"], RESNET_INPUT) == [n for n in first if ".1." in n] + [
        "fc"
    ]


def test_a_module_that_is_called_just_so_is_meant_alone() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 4), nn.ReLU()))
    assert names(model, ["0"], torch.zeros(2, 4)) == ["0"]
    assert names(model, ["1.0"], torch.zeros(2, 4)) == ["1.0"]


@pytest.mark.parametrize(
    ("slots", "message"),
    [
        ([3], "names of modules, got 3"),
        (["layer9"], "has no module 'layer9'"),
        (["layer1", "layer1.0.skip", "nope"], "has no module 'nope'"),
        (r"nothing\d", "matches no slot"),
        (lambda name, module: False, "matches no slot"),
        ([], "matches no slot"),
        ("layer[", "not a regular expression"),
    ],
)
def test_bad_choices_are_refused(slots: object, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        names(ResNet20(), slots, RESNET_INPUT)


def test_an_example_that_does_not_run_is_refused() -> None:
    with pytest.raises(ConfigError, match="does not run on the example"):
        list_slots(ResNet20(), torch.zeros(2, 1, 8, 8))
    with pytest.raises(ConfigError, match="has no tensor"):
        list_slots(ResNet20(), "text")


def test_tuples_dicts_and_shared_modules() -> None:
    class Both(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.shared = nn.Linear(4, 4)

        def forward(self, left: Tensor, right: Tensor) -> Tensor:
            return self.shared(left) + self.shared(self.shared(right))

    left, right = torch.randn(3, 4), torch.randn(3, 4)
    for example in ((left, right), {"left": left, "right": right}):
        (slot,) = list_slots(Both(), example)
        assert (slot.name, slot.calls, slot.macs) == ("shared", 3, 48)
        network = GrownModule.wrap(Both(), ["shared"], example)
        _, _, macs = seed_costs(network.catalogue, network.sites, network.output)
        lora = network.catalogue.index("lora")
        assert macs[0, lora] == 3 * (4 * 8 + 8 * 4)


def test_a_slot_that_returns_a_tuple_grows_its_first_element() -> None:
    (gru,) = (s for s in list_slots(GRUClassifier(), torch.zeros(2, 7, dtype=torch.int64)) if
              s.name == "gru")  # fmt: skip
    assert (gru.shape, gru.topology) == ((7, 8), "transformer")


def test_host_and_seed_costs_are_those_of_the_modules() -> None:
    for name, (make, slots, _, example) in ARCHITECTURES.items():
        network = GrownModule.wrap(make(), slots, example())
        fits, params, macs = seed_costs(network.catalogue, network.sites, network.output)
        assert network.host_macs > 0, name
        for slot, blueprint in zip(*fits.nonzero(), strict=True):
            network.germinate(int(slot), int(blueprint), 0, 0)
            seed = network.slot(int(slot)).seed
            assert seed is not None
            assert params[slot, blueprint] == count_params(seed)
            assert macs[slot, blueprint] > 0 or network.catalogue[blueprint].name == "norm"
            network.remove(int(slot))


def test_networks_whose_answer_is_not_clear_get_no_branches() -> None:
    class Dict(nn.Module):
        def __init__(self, *names: str) -> None:
            super().__init__()
            self.layer, self.names = nn.Linear(4, 4), names

        def forward(self, x: Tensor) -> dict[str, Tensor]:
            return {name: self.layer(x) for name in self.names}

    for names, clear in ((("boxes",), True), (("boxes", "logits"), True), (("a", "b"), False)):
        network = GrownModule.wrap(Dict(*names), ["layer"], torch.zeros(2, 4))
        fits, _, _ = seed_costs(network.catalogue, network.sites, network.output)
        assert fits[0, network.catalogue.index("branch")] == clear, names
        assert fits[0, network.catalogue.index("lora")]


def test_the_tiny_transformer_offers_its_layers() -> None:
    slots = list_slots(TinyTransformer(), torch.zeros(2, 7, dtype=torch.int64))
    assert {"encoder", "encoder.layers.0", "encoder.layers.1"} <= {slot.name for slot in slots}


def test_evaluating_brings_back_the_mode_of_each_module() -> None:
    model = nn.Sequential(nn.Dropout(), nn.Sequential(nn.Dropout(), nn.Dropout()))
    model[1][0].eval()  # type: ignore[index]
    before = [module.training for module in model.modules()]
    with evaluating(model), evaluating(model):
        assert not any(module.training for module in model.modules())
        assert not torch.is_grad_enabled()
    assert [module.training for module in model.modules()] == before
