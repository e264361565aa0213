"""Models of users through `grow`: losses and scores by name, slots that are found for them,
scripts, baselines, and one sentence for what cannot work."""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import esper
import model_cases
from esper.growth.export import largest_difference
from esper.leyline import ConfigError, EsperError
from esper.tamiyo.controllers.scripted import ScriptedController

Batches = list[tuple[Any, Any]]


def mlp(inputs: int = 4, outputs: int = 3) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(inputs, 8), nn.ReLU(), nn.Linear(8, outputs))


def data(size: int = 48, inputs: int = 4, classes: int = 3) -> Batches:
    draw = torch.Generator().manual_seed(0)
    x = torch.randn(size, inputs, generator=draw)
    y = x[:, :classes].argmax(1)
    return list(zip(x.split(16), y.split(16), strict=True))


def grow(model: Any = None, batches: Any = None, val: Any = None, **arguments: Any) -> esper.Grown:
    torch.manual_seed(0)
    batches = data() if batches is None else batches
    given = {"steps": 3, "controller": "static", **arguments}
    given.setdefault("settings", esper.GrowthSettings(progress=False))
    model = mlp() if model is None else model
    return esper.grow(model, batches, batches if val is None else val, **given)


# --- classes of losses and scores ---------------------------------------------------------------


class Pixels(nn.Module):
    """Four classes of pixels in images of width 4, so that both dimensions are as long."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Conv2d(1, 8, 3, padding=1), nn.Conv2d(8, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.relu(self.body(x)))


def pixels(height: int) -> Batches:
    draw = torch.Generator().manual_seed(1)
    x = torch.rand(64, 1, height, 4, generator=draw)
    return list(zip(x.split(16), (4 * x[:, 0]).long().split(16), strict=True))


def test_classes_of_maps_are_in_dimension_1() -> None:
    grown = grow(
        Pixels(),
        pixels(height=6),
        steps=25,
        optimizer=lambda p: torch.optim.AdamW(p, lr=0.02),
    )
    assert grown.outcome.val_score is not None
    assert grown.outcome.val_score > 70.0, "on the wrong dimension it stays near 25"


@pytest.mark.parametrize("axis", [1, -1])
def test_losses_by_name_are_those_of_torch_on_either_dimension(axis: int) -> None:
    first = torch.randn(4, 5, 6)
    target = torch.randint(0, 5, (4, 6))
    target[0, 0] = -100
    width = 6 if axis == 1 else 5
    model = nn.Sequential(nn.Linear(width, width), nn.Linear(width, width))
    inputs = first if axis == 1 else first.movedim(1, -1)
    found = grow(model, [(inputs, target)], slots=["0"], steps=2)
    with torch.no_grad():
        logits = found.model(inputs).movedim(axis, 1)
    wanted = F.cross_entropy(logits, target)
    right = (logits.argmax(1) == target)[target != -100].float().mean()
    assert found.outcome.val_loss == pytest.approx(float(wanted), rel=1e-5)
    assert found.outcome.val_score == pytest.approx(100 * float(right), rel=1e-5)


def test_shapes_with_two_readings_are_refused_unless_another_batch_has_one() -> None:
    model = mlp(4, 5)
    square = (torch.randn(8, 5, 4), torch.randint(0, 5, (8, 5)))
    longer = (torch.randn(8, 6, 4), torch.randint(0, 5, (8, 6)))
    with pytest.raises(ConfigError, match="dimension 1 or in the last"):
        grow(model, [square])
    assert grow(model, [square, longer]).outcome.val_loss is not None


def test_probabilities_and_whole_numbers_are_targets_as_in_torch() -> None:
    soft = [(x, F.one_hot(y, 3).float()) for x, y in data()]
    hard = [(x, y[:, None].int()) for x, y in data()]
    runs = [grow(batches=batches).outcome for batches in (data(), soft, hard)]
    assert len({(round(run.val_loss or 0.0, 5), run.val_score) for run in runs}) == 1
    whole = [(x, y[:, None]) for x, y in data()]
    double = [(x, y[:, None].double()) for x, y in data()]
    for loss, score in (("mse", "negative_mse"), ("bce_with_logits", "binary_accuracy")):
        both = [[(x, y.clamp(max=1)) for x, y in each] for each in (whole, double)]
        scores = {grow(mlp(4, 1), each, loss=loss, score=score).outcome.val_score for each in both}
        assert len(scores) == 1


class Named(nn.Module):
    """Returns a ModelOutput, as the models of a well-known library do."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = mlp()

    def forward(self, x: Tensor) -> model_cases.ModelOutput:
        return model_cases.ModelOutput(self.trunk(x), x)


def test_loss_and_score_get_the_same_kind_of_output() -> None:
    grown = grow(
        Named(),
        loss=lambda output, target: F.cross_entropy(output.logits, target),
        score=lambda output, target: float((output.logits.argmax(1) == target).float().mean()),
    )
    assert grown.outcome.val_score is not None


# --- slots ---------------------------------------------------------------------------------------


class Masked(nn.Module):
    def __init__(self, *, nested: bool) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
        self.embed = nn.Embedding(10, 8)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=nested)
        self.head = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.encoder(self.embed(x), src_key_padding_mask=x == 0).mean(1))


def padded() -> Batches:
    tokens = torch.randint(1, 10, (32, 6), generator=torch.Generator().manual_seed(0))
    tokens[:, 4:] = 0
    return list(zip(tokens.split(16), (tokens[:, 0] % 3).split(16), strict=True))


ATTEND = "1 GERMINATE r0c0 attention linear\nauto FOSSILIZE"


def test_layers_that_get_nested_tensors_are_no_slots_and_the_listing_says_why() -> None:
    batches, script = padded(), ScriptedController(ATTEND, "attend")
    listing = esper.list_slots(Masked(nested=True), batches[0][0])
    assert not [slot.name for slot in listing if slot.name.startswith("encoder.")]
    assert "enable_nested_tensor=False" in str(listing)
    with pytest.raises(ConfigError, match="enable_nested_tensor=False"):
        grow(Masked(nested=True), batches, slots=["encoder.layers.0"])
    for model, slot in ((Masked(nested=True), "encoder"), (Masked(nested=False), "layers.0")):
        assert grow(model, batches, slots=[slot], controller=script).outcome.germinated == 1


@pytest.mark.parametrize("make", [mlp, Pixels, model_cases.UNet, model_cases.ViT])
def test_slots_are_found_inside_the_model(make: Callable[[], nn.Module]) -> None:
    model = make()
    example = torch.randn(2, 4) if make is mlp else torch.randn(2, 1, 8, 8)
    body = esper.attach(model, evaluate=lambda: 0.0, example=example, steps=2)
    names = body.model.slot_config.names
    assert 1 <= len(names) <= 4
    assert not {"head", "2"} & set(names), "not the last layer"
    body.close()


# --- scripts -------------------------------------------------------------------------------------


class VAE(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encode, self.decode = mlp(8, 8), mlp(4, 8)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        mean, spread = self.encode(x).chunk(2, dim=1)
        return self.decode(mean + torch.randn_like(mean) * spread.exp()), mean, spread


class Twins(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = mlp(8, 4)

    def forward(self, left: Tensor, right: Tensor) -> Tensor:
        return F.cosine_similarity(self.net(left), self.net(right))


class Table(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.columns = nn.ModuleDict({"shop": nn.Embedding(5, 4), "day": nn.Embedding(7, 4)})
        self.net = mlp(11, 1)

    def forward(self, codes: Tensor, numbers: Tensor) -> Tensor:
        parts = [column(codes[:, i]) for i, column in enumerate(self.columns.values())]
        return self.net(torch.cat([*parts, numbers], dim=1)).squeeze(1)


def reconstruction(output: Any, target: Tensor) -> Tensor:
    return F.mse_loss(output[0], target)


X = torch.randn(16, 8, generator=torch.Generator().manual_seed(3))
MSE = {"loss": "mse", "score": "negative_mse"}
MODELS: dict[str, tuple[Callable[[], nn.Module], Batches, dict[str, Any]]] = {
    "vae": (VAE, [(X, X)], {"loss": reconstruction, "score": lambda o, t: -reconstruction(o, t)}),
    "siamese": (Twins, [((X, X.flip(0)), X[:, 0])], MSE),
    "u-net": (model_cases.UNet, [(torch.rand(8, 1, 8, 8), torch.zeros(8, 8, 8).long())], {}),
    "table": (Table, [((torch.zeros(16, 2).long(), X[:, :3]), X[:, 0])], MSE),
}


@pytest.mark.parametrize("name", MODELS)
def test_the_early_script_plants_what_is_legal_and_the_result_is_exported(name: str) -> None:
    make, batches, arguments = MODELS[name]
    grown = grow(make(), batches, controller="scripted:early", steps=6, **arguments)
    assert grown.outcome.germinated == 1
    plain = grown.export()
    assert largest_difference(grown.model, plain, batches[0][0]) <= 1e-5


def test_a_line_that_is_not_legal_says_why() -> None:
    make, batches, arguments = MODELS["u-net"]
    script = ScriptedController("1 GERMINATE r0c0 branch linear", "own")
    with pytest.raises(ConfigError, match=r"because in .* only these fit"):
        grow(make(), batches, controller=script, **arguments)
    twice = "1 GERMINATE r0c0 mlp linear\n2 GERMINATE r0c0 mlp linear"
    with pytest.raises(ConfigError, match=r"because .* not empty"):
        grow(controller=ScriptedController(twice, "own"), steps=4)


# --- results -------------------------------------------------------------------------------------


def test_a_seed_that_a_restored_epoch_brings_back_is_removed_once() -> None:
    scores = iter([1.0, 2.0, 9.0, 9.0, *[0.5] * 90])

    def best_with_the_seed(output: Tensor, target: Tensor) -> float:
        return next(scores)

    script = "1 GERMINATE r0c0 norm linear\n4 CULL r0c0"
    grown = grow(controller=ScriptedController(script, "own"), score=best_with_the_seed, steps=6)
    outcome = grown.outcome
    assert sum(event.row()["event"] == "SeedCulled" for event in grown.events) == 2
    assert (outcome.germinated, outcome.culled, len(outcome.seeds)) == (1, 1, 0)


def test_the_result_says_what_growth_gained_or_that_there_is_no_baseline() -> None:
    alone = grow(controller="scripted:early", steps=4)
    assert alone.outcome.twin is None
    assert alone.twin_cost is not None
    assert "no baseline was trained" in str(alone)
    assert f"{alone.twin_cost:.0%}" in str(alone)
    settings = esper.GrowthSettings(insured=True, progress=False)
    insured = grow(controller="scripted:early", steps=4, settings=settings)
    twin = insured.outcome.twin
    assert twin is not None
    assert twin.gain is not None
    assert f"growth gained {twin.gain:+.2f}" in str(insured)


def test_a_cheap_twin_is_trained_by_default() -> None:
    """A host of one narrow layer, with a seed that costs many times as much."""

    class Wide(nn.Module):
        def __init__(self, channels: int) -> None:
            super().__init__()
            self.inside = nn.Sequential(nn.Linear(channels, 4000), nn.Linear(4000, channels))

        def forward(self, h: Tensor) -> Tensor:
            return self.inside(h)

    wide = esper.BlueprintSpec("wide", "residual", {"mlp": Wide}, "very wide")
    slots = esper.Slots(blueprints=esper.default_catalogue().with_blueprint(wide))
    script = ScriptedController("1 GERMINATE r0c0 wide linear", "own")
    settings = esper.GrowthSettings(progress=False, incubation="joint")
    grown = grow(controller=script, slots=slots, steps=12, settings=settings)
    assert grown.twin_cost is not None
    assert grown.twin_cost < 0.1
    assert grown.outcome.twin is not None


def test_dir_lists_what_the_package_offers() -> None:
    assert {"grow", "attach", "list_slots", "Slots", "transformers"} <= set(dir(esper))


def test_one_call_saves_and_one_loads_with_esper_or_without(tmp_path: Path) -> None:
    script = "1 GERMINATE r0c0 mlp linear\nauto FOSSILIZE"
    settings = esper.GrowthSettings(incubation="joint", progress=False, min_contribution=-1e9)
    grown = grow(controller=ScriptedController(script, "own"), steps=8, settings=settings)
    x = data()[0][0]
    live = esper.load(grown.save(tmp_path / "live"), mlp())
    assert largest_difference(live, grown.model, x) == 0.0
    plain = grown.export()
    torch.save(plain, tmp_path / "plain.pt")
    code = (
        "import sys, json, torch\n"
        "sys.modules['esper'] = None\n"
        "model = torch.load(sys.argv[1], weights_only=False).eval()\n"
        "print(json.dumps(model(torch.ones(2, 4)).tolist()))"
    )
    ran = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path / "plain.pt")],
        capture_output=True,
        text=True,
        check=True,
    )
    with torch.no_grad():
        wanted = grown.model.eval()(torch.ones(2, 4))
    assert torch.allclose(torch.tensor(json.loads(ran.stdout)), wanted, atol=1e-5)


def test_seeds_have_the_type_of_the_layer_that_they_act_on() -> None:
    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Linear(4, 8), nn.Linear(8, 3)
            self.middle = nn.Linear(8, 8).bfloat16()

        def forward(self, x: Tensor) -> Tensor:
            return self.last(self.middle(self.first(x).bfloat16()).float())

    grown = grow(Mixed(), slots=["middle"], controller="scripted:early", steps=4)
    assert grown.outcome.germinated == 1


# --- one sentence --------------------------------------------------------------------------------


def no_grad() -> Any:
    with torch.no_grad():
        return grow()


def failing() -> nn.Module:
    model = mlp()
    model.forward = lambda x: 1 / 0  # type: ignore[method-assign, assignment]
    return model


class FailsInTraining(nn.Sequential):
    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            raise ValueError("no training today")
        return super().forward(x)


class Broken(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()

    def forward(self, h: Tensor) -> Any:
        return (h,)


def with_blueprint(factory: Any) -> Any:
    own = esper.BlueprintSpec("own", "residual", {"mlp": factory}, "a user's")
    catalogue = esper.default_catalogue().with_blueprint(own)
    script = ScriptedController("1 GERMINATE r0c0 own linear", "own")
    return grow(slots=esper.Slots(blueprints=catalogue), controller=script)


def scheduled(scheduler: Callable[[Any], Any]) -> Any:
    return grow(optimizer=(lambda p: torch.optim.SGD(p, lr=0.1), scheduler))


def shifted(by: int) -> Batches:
    return [*data(), *[(x, y + by) for x, y in data()]]


def nan_inputs() -> Batches:
    return [(x * float("nan"), y) for x, y in data()]


one_cycle = torch.optim.lr_scheduler.OneCycleLR
BAD: dict[str, tuple[Callable[[], Any], str]] = {
    "budget": (lambda: esper.Budget(10**400), "budget params"),
    "budget-macs": (lambda: esper.Budget(macs=-(10**400)), "budget macs"),
    "setting": (lambda: esper.GrowthSettings(min_contribution=10**400), "min_contribution"),
    "out-nul": (lambda: grow(out="a\0b"), "out must be"),
    "out-long": (lambda: grow(out="x" * 300), "out must be"),
    "meta": (lambda: grow(mlp().to("meta")), "meta device"),
    "no-grad": (no_grad, "no_grad"),
    "out-of-range": (lambda: grow(batches=shifted(5)), "outputs, for classes 0 to 2"),
    "negative": (lambda: grow(batches=shifted(-5)), "outputs, for classes 0 to 2"),
    "constant": (lambda: grow(loss=lambda o, t: (o * 0).sum()), "constant"),
    "detached": (lambda: grow(loss=lambda o, t: o.detach().sum()), "does not depend"),
    "nan-loss": (lambda: grow(loss=lambda o, t: o.sum() * float("nan")), "is nan"),
    "nan-data": (lambda: grow(val=nan_inputs()), "val_loader is nan"),
    "complex-loss": (lambda: grow(loss=lambda o, t: o.sum() * 1j), "complex64"),
    "loss-raises": (lambda: grow(loss=lambda o, t: 1 / 0), "division by zero"),
    "bce-range": (
        lambda: grow(
            mlp(4, 1),
            [(x, y[:, None] - 1.0) for x, y in data()],
            loss="bce_with_logits",
            score="binary_accuracy",
        ),
        "from 0 to 1",
    ),
    "probabilities": (
        lambda: grow(batches=[(x, torch.full((16, 3), 2.0)) for x, y in data()]),
        "add up to 1",
    ),
    "numpy-targets": (lambda: grow(batches=[(x, y.numpy()) for x, y in data()]), "one tensor"),
    "one-hot": (lambda: grow(batches=[(x, F.one_hot(y, 3)) for x, y in data()]), "argmax"),
    "empty-batch": (lambda: grow(batches=[(torch.ones(0, 4), torch.ones(0).long())]), "empty"),
    "later-width": (
        lambda: grow(batches=[*data(), (torch.ones(16, 5), data()[0][1])]),
        "training failed at batch 4",
    ),
    "model-raises": (lambda: grow(failing()), "division by zero"),
    "fails-in-training": (lambda: grow(FailsInTraining(*mlp())), "no training today"),
    "sparse": (
        lambda: grow(
            nn.Sequential(nn.Embedding(9, 8, sparse=True), nn.Flatten(), nn.Linear(32, 3)),
            [(torch.zeros(16, 4).long(), data()[0][1])],
        ),
        "sparse=False",
    ),
    "scripted": (lambda: grow(torch.jit.script(mlp())), "torch.jit"),
    "predicate": (lambda: grow(slots=lambda name: True), "predicate"),
    "layout": (lambda: grow(slots=esper.Slots(["1"], layout={"1": ["B"]})), "layout"),
    "no-module": (lambda: grow(nn.Linear(4, 3)), "no module where a seed could grow"),
    "no-blueprint": (
        lambda: grow(slots=esper.Slots(blueprints=esper.BlueprintCatalogue(()))),
        "no blueprint fits",
    ),
    "factory": (lambda: with_blueprint(lambda channels: 1 / 0), "factory of blueprint 'own'"),
    "no-seed": (lambda: with_blueprint(lambda channels: None), "must return a torch.nn.Module"),
    "seed-output": (lambda: with_blueprint(Broken), "returned tuple"),
    "rate": (lambda: grow(optimizer=lambda p: torch.optim.SGD(p, lr=-1)), "learning rate"),
    "scheduler": (
        lambda: scheduled(lambda o: one_cycle(o, 0.1, total_steps=2)),
        "scheduler failed after epoch 3",
    ),
    "topology": (
        lambda: grow(settings=esper.GrowthSettings(topology=((5, 99),), progress=False)),
        "topology",
    ),
    "example": (lambda: esper.list_slots(mlp(), torch.ones(0, 4)), "empty"),
    "load-meta": (
        lambda: esper.load(grow().save("saved"), mlp().to("meta")),
        "meta device",
    ),
    "load-model": (lambda: esper.load("none", 3), "model must be"),  # type: ignore[arg-type]
    "save-nul": (lambda: grow().save("a\0b"), "folder must be"),
    "plot": (lambda: grow().plot("picture.zzz"), "cannot be written"),
    "export-example": (lambda: esper.export(grow().model, torch.ones(2, 9)), "on the example"),
    "attach-meta": (
        lambda: esper.attach(mlp().to("meta"), evaluate=lambda: 0.0, example=torch.ones(2, 4)),
        "meta device",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_what_cannot_work_is_one_sentence_and_leaves_nothing(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    call, message = BAD[name]
    monkeypatch.chdir(tmp_path)
    with pytest.raises(EsperError, match=message) as error:
        call()
    assert "\n" not in str(error.value)
    assert not [p for p in tmp_path.iterdir() if p.name != "saved"]
