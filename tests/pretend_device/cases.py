"""Tests that run on the simulated accelerator, in a process started by tests/test_device.py.

To run one alone: python tests/pretend_device/run.py [-k NAME]
"""

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import esper
import pretend_device
from command_support import esper_here
from esper.growth.devices import (
    devices_of,
    find_device,
    generator_states,
    keyed,
    on_device,
    to_host,
)
from esper.leyline import ConfigError
from esper.simic.training.checkpoint import load_state
from esper.tolaria.engine.batches import TensorSource
from esper.tolaria.engine.population import LoopedPopulation
from esper.tolaria.engine.run import make_env
from helpers import small_digits
from training_support import tiny_run

FIRST, SECOND = torch.device("pretend:0"), torch.device("pretend:1")
QUIET = esper.GrowthSettings(progress=False)
SCRIPT = "scripted:early"
WIDTH = 6

# Weights of new policies do not fit small hosts well; warnings are not what is tested here.
pytestmark = pytest.mark.filterwarnings("ignore::esper.leyline.EsperWarning")


def model(device: Any = "cpu") -> nn.Module:
    with keyed(0):
        return nn.Sequential(
            nn.Conv2d(1, WIDTH, 3, padding=1),
            nn.GELU(),
            nn.Dropout(0.1),
            nn.Flatten(),
            nn.Linear(WIDTH * 64, 10),
        ).to(device)


SLOTS = ["0"]


def loaders(batches: int = 3, size: int = 32) -> tuple[list[Any], list[Any]]:
    _, data = small_digits()
    train = [
        (x, y)
        for x, y in zip(data.train_x.split(size), data.train_y.split(size), strict=True)
        if len(x) == size
    ][:batches]
    return train, [(data.val_x[:100], data.val_y[:100])]


def grow(device: Any = "cpu", steps: int = 5, **options: Any) -> esper.Grown:
    options = {"slots": SLOTS, "settings": QUIET, "controller": SCRIPT, **options}
    return esper.grow(model(device), *loaders(), steps=steps, **options)


def check_close(first: esper.Grown, second: esper.Grown) -> None:
    assert first.topology == second.topology
    for mine, other in zip(first.history, second.history, strict=True):
        for name in ("train_loss", "val_loss"):
            assert mine[name] == pytest.approx(other[name], rel=1e-3), name


# --- growing -------------------------------------------------------------------------------------


@pytest.mark.parametrize("where", ["cpu", "pretend"])
def test_slots_are_listed_whatever_device_the_example_is_on(where: str):
    example = torch.zeros(2, 1, 8, 8, device=where)
    found = esper.list_slots(model("pretend"), example)
    assert [slot.name for slot in found] == [
        slot.name for slot in esper.list_slots(model(), torch.zeros(2, 1, 8, 8))
    ]


@pytest.mark.parametrize("controller", ["heuristic", SCRIPT, "pretrained"])
def test_growth_is_that_of_the_cpu_and_can_be_exported(controller: str):
    def without_noise(device: str) -> esper.Grown:
        # The generator of a device draws other masks than that of the CPU.
        host = model(device)
        host[2] = nn.Identity()
        options: Any = {"slots": SLOTS, "steps": 6, "settings": QUIET, "controller": controller}
        return esper.grow(host, *loaders(), **options)

    grown = without_noise("pretend")
    assert devices_of(grown.model) == [FIRST]
    check_close(grown, without_noise("cpu"))
    plain, x = grown.export(), loaders()[1][0][0]
    on_cpu = copy.deepcopy(plain).cpu()
    assert devices_of(on_cpu) == [torch.device("cpu")]
    torch.testing.assert_close(
        plain.eval()(x.to("pretend")).cpu(), on_cpu.eval()(x), rtol=1e-4, atol=1e-5
    )


def test_a_trained_model_is_cooled_and_grows():
    grown = grow("pretend", start="trained", controller=SCRIPT)
    assert grown.outcome.germinated > 0
    assert devices_of(grown.model) == [FIRST]


def test_a_device_is_a_setting_and_moves_the_model():
    host = model()
    optimizer = torch.optim.AdamW(host.parameters())
    host(torch.zeros(1, 1, 8, 8)).sum().backward()
    optimizer.step()  # its state is on the CPU
    settings = replace(QUIET, device="pretend:1")
    grown = esper.grow(
        host, *loaders(), slots=SLOTS, steps=3, optimizer=optimizer, settings=settings
    )
    assert devices_of(grown.model) == [SECOND]
    assert find_device("auto") == FIRST
    with pytest.raises(ConfigError, match="pretend:1"):
        find_device("pretend:2")


def test_a_network_is_saved_and_loaded(tmp_path: Path):
    grown = grow("pretend")
    grown.save(tmp_path / "grown")
    x = torch.zeros(2, 1, 8, 8)
    expected = grown.model.eval()(x.to("pretend"))
    for device in ("cpu", "pretend:1"):
        loaded = esper.load(tmp_path / "grown", model(device))
        torch.testing.assert_close(loaded.eval()(x.to(device)).cpu(), expected.cpu())


class _Stop(esper.Callback):
    """Ends a run as Ctrl-C does."""

    def __init__(self, epoch: int) -> None:
        self.epoch = epoch

    def on_epoch(self, row: dict[str, Any]) -> None:
        if row["step"] == self.epoch:
            raise RuntimeError("killed")


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_a_resumed_run_is_equal_bit_by_bit(tmp_path: Path, precision: str):
    """Also the loss scale of fp16 and the generators of the device continue."""
    settings = replace(QUIET, precision=precision)
    torch.manual_seed(1)
    whole = grow("pretend", settings=settings, out=tmp_path / "whole")
    torch.manual_seed(1)
    with pytest.raises(RuntimeError, match="killed"):
        grow("pretend", settings=settings, out=tmp_path / "run", callbacks=[_Stop(3)])
    torch.manual_seed(2)
    resumed = grow("pretend", settings=settings, out=tmp_path / "run", resume=True)
    assert resumed.history == whole.history
    for name, tensor in whole.model.state_dict().items():
        assert torch.equal(tensor, resumed.model.state_dict()[name]), name


def test_a_run_is_insured():
    grown = grow("pretend", settings=replace(QUIET, insured=True))
    assert grown.outcome.twin is not None
    assert devices_of(grown.model) == [FIRST]


# --- a user's own loop ---------------------------------------------------------------------------


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_attach_works_in_a_loop_with_any_precision(precision: str):
    """The example and the loaders are on the CPU; the model moves after `attach`."""
    host, (train, val) = model(), loaders()

    def evaluate() -> float:
        with torch.no_grad():
            right = [host(x.to("pretend")).argmax(1).cpu() == y for x, y in val]
        return 100.0 * float(torch.cat(right).float().mean())

    body = esper.attach(
        host, slots=SLOTS, example=train[0][0], evaluate=evaluate, steps=6, controller=SCRIPT
    )
    host.to("pretend")
    optimizer = torch.optim.AdamW(host.parameters(), lr=3e-3)
    # With this scale the first steps overflow, and are skipped.
    scaler = torch.amp.GradScaler("pretend", 2.0**40, enabled=precision == "fp16")
    dtype = torch.bfloat16 if precision == "bf16" else torch.float16
    with body:
        body.manage(optimizer)
        for _ in range(6):
            for x, y in train:
                optimizer.zero_grad()
                with torch.autocast("pretend", dtype, enabled=precision != "fp32"):
                    loss = F.cross_entropy(host(x.to("pretend")), y.to("pretend"))
                scaler.scale(loss).backward()
                scaler.unscale_(optimizer)
                nn.utils.clip_grad_norm_(body.model.parameters(), 1.0)
                scaler.step(optimizer)
                scaler.update()
            with body.evaluating():
                score = evaluate()
            body.step(score)
    assert body.outcome is not None
    assert body.outcome.rollbacks == 0
    assert body.outcome.germinated > 0
    assert devices_of(body.export()) == [FIRST]


# --- precision of built-in hosts -----------------------------------------------------------------


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_half_precision_learns_and_skipped_steps_are_no_damage(precision: str):
    grown = grow("pretend", settings=replace(QUIET, precision=precision))
    assert grown.outcome.rollbacks == 0
    assert grown.history[-1]["val_loss"] < grown.history[0]["val_loss"]


# --- two devices ---------------------------------------------------------------------------------


class Split(nn.Module):
    """A network over two devices."""

    def __init__(self) -> None:
        super().__init__()
        with keyed(0):
            self.first = nn.Sequential(nn.Linear(64, 16), nn.ReLU()).to(FIRST)
            self.second = nn.Sequential(nn.Linear(16, 16), nn.ReLU()).to(SECOND)
            self.relu = nn.ReLU()
            self.head = nn.Linear(16, 10).to(SECOND)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.relu(self.second(self.first(x).to(SECOND))))


@pytest.mark.parametrize("blueprint", ["residual", "branch", "bypass"])
def test_each_seed_is_on_the_device_of_its_slot(blueprint: str):
    train, val = ([(x.flatten(1), y) for x, y in part] for part in loaders())
    host = Split()
    catalogue = esper.default_catalogue()
    names = [
        spec.name for spec in catalogue.specs if spec.kind == blueprint and "mlp" in spec.factories
    ]

    class Plant:
        name = "plant"

        def reset(self, n_envs: int) -> None: ...

        def act(self, situation: Any) -> np.ndarray:
            from esper.leyline import LifecycleOp
            from esper.tamiyo.situation import wait

            actions = wait(1)
            masks = situation.masks
            slots = np.flatnonzero(masks.slot[0, LifecycleOp.GERMINATE])
            for slot in slots.tolist():
                fit = [
                    i
                    for i in np.flatnonzero(masks.blueprint[0, slot]).tolist()
                    if situation.catalogue.names[i] in names
                ]
                if fit:
                    actions[0] = (slot, fit[0], 0, LifecycleOp.GERMINATE)
                    break
            return actions

    options: Any = {"slots": ["first", "second", "relu"], "settings": QUIET}
    grown = esper.grow(host, train, val, controller=Plant(), steps=7, **options)
    assert devices_of(host.first) == [FIRST]
    assert devices_of(host.head) == [SECOND]
    assert grown.outcome.germinated > 0
    grown.export()
    with pytest.raises(ConfigError, match="device"):
        esper.grow(
            Split(), train, val, steps=2, slots=["first"], settings=replace(QUIET, device="auto")
        )


# --- generators ----------------------------------------------------------------------------------


def test_only_the_generators_in_use_are_seeded_and_restored():
    torch.manual_seed(5)
    before = generator_states([FIRST, SECOND])
    with keyed(3, [FIRST]):
        one, host = torch.randn(3, device=FIRST), torch.randn(3)
        assert torch.equal(generator_states([SECOND])[str(SECOND)], before[str(SECOND)])
    after = generator_states([FIRST, SECOND])
    assert all(torch.equal(before[name], after[name]) for name in before)
    with keyed(3, [FIRST]):
        assert torch.equal(one, torch.randn(3, device=FIRST))
        assert torch.equal(host, torch.randn(3))


def test_noise_of_training_depends_on_the_key_and_nothing_else():
    torch.manual_seed(1)
    first = grow("pretend", steps=2)
    state = generator_states([FIRST])
    torch.manual_seed(2)
    assert grow("pretend", steps=2).history == first.history
    assert not torch.equal(generator_states([FIRST])[str(FIRST)], state[str(FIRST)])


# --- data and transfers --------------------------------------------------------------------------


def test_data_is_kept_on_the_device_only_where_there_is_room(monkeypatch: pytest.MonkeyPatch):
    x, y = torch.randn(20, 3), torch.arange(20)
    source = TensorSource((x, y), (x, y), 8)
    assert source.on(FIRST).train[0].device == FIRST
    for mine, other in zip(source.on(FIRST).train_batches(7), source.train_batches(7), strict=True):
        assert torch.equal(mine[0].cpu(), other[0])
    monkeypatch.setenv("PRETEND_MEMORY", "1000")
    assert source.on(FIRST) is source
    moved = on_device({"x": x, "name": "x"}, SECOND)
    assert moved["x"].device == SECOND
    assert moved["name"] == "x"


def test_tensors_of_all_kinds_are_fetched_with_one_transfer():
    tensors = [
        torch.arange(3, dtype=torch.uint8),
        torch.randn(2, 3),
        torch.randn(()),
        torch.arange(4),
        torch.tensor([True, False, True]),
        torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
        torch.empty(0),
        torch.randn(3).bfloat16(),
    ]
    moved = [tensor.to("pretend") for tensor in tensors]
    with pretend_device.waits() as found:
        back = to_host([*moved, tensors[1]])
    assert found.total == 1
    for mine, other in zip(back, [*tensors, tensors[1]], strict=True):
        assert mine.device.type == "cpu"
        assert mine.stride() == other.stride()
        assert torch.equal(mine, other)


@contextmanager
def population(batches: int, **settings: Any) -> Iterator[Any]:
    task, data = small_digits(train=batches * 8)
    task = replace(task, batch=8)
    own = esper.GrowthSettings(20, device="pretend", keep_best=False, **settings)
    yield make_env(task.recipe(data), [0], own)


def epoch_waits(batches: int, **settings: Any) -> pretend_device.Waits:
    """Waits of an epoch with a seed that is blended in."""
    with population(batches, **settings) as env:
        host: LoopedPopulation = env.population
        env.reset()
        from esper.leyline import LifecycleOp
        from esper.tamiyo.situation import wait

        act = wait(1)
        act[0] = (0, env.situation.catalogue.index("norm"), 0, LifecycleOp.GERMINATE)
        env.step(act)
        for _ in range(2):
            env.step(wait(1))
        assert host.networks[0].slot(0).seed is not None
        with pretend_device.waits() as found:
            env.step(wait(1))
    return found


def test_waits_per_epoch_do_not_depend_on_the_number_of_batches():
    few, many = epoch_waits(2), epoch_waits(30)
    assert few.places == many.places, many.table()
    # Training, gradients, validation, and the snapshot of a healthy network.
    assert few.total == 4, few.table()


def test_snapshots_can_stay_on_the_device():
    found = epoch_waits(2, snapshots="device")
    assert found.total == 3, found.table()


def test_half_precision_waits_only_for_its_scale_in_a_snapshot():
    few, many = epoch_waits(2, precision="fp16"), epoch_waits(30, precision="fp16")
    assert few.places == many.places, many.table()
    assert few.total == 6, few.table()


# --- commands ------------------------------------------------------------------------------------


def test_esper_grow_trains_on_a_device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    out = tmp_path / "run"
    words = ("--device", "pretend:1", "--steps", "3", "--batches-per-epoch", "2")
    options = ("--controller", SCRIPT, "--out", str(out), "--quiet")
    assert esper_here(monkeypatch, "grow", *options, *words) == 0
    assert 'device = "pretend:1"' in (out / "config.toml").read_text()
    assert "test_score" in (out / "summary.json").read_text()
    # The exported program runs on the CPU.
    program = torch.export.load(out / "model.pt2").module()
    assert devices_of(program) in ([], [torch.device("cpu")])


def test_esper_evaluate_trains_on_a_device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    out = tmp_path / "evaluation"
    words = ("--keys", "2", "--steps", "2", "--arms", "static,heuristic", "--no-controls")
    options = ("--device", "pretend", "--out", str(out), "--quiet")
    assert esper_here(monkeypatch, "evaluate", *options, *words) == 0
    assert (out / "evaluation.json").is_file()


# --- policies ------------------------------------------------------------------------------------


@pytest.mark.parametrize("population", ["looped", "fused"])
def test_a_policy_is_trained_on_a_device(tmp_path: Path, population: str):
    found = tiny_run(tmp_path / "device", devices=["pretend:1"], population=population, rounds=1)
    assert devices_of(found.agent.network) == [SECOND]
    saved = load_state(tmp_path / "device").agent.network
    for mine, other in zip(saved.parameters(), found.agent.network.parameters(), strict=True):
        assert torch.equal(mine, other.cpu())
    on_cpu = tiny_run(tmp_path / "cpu", population=population, rounds=1)
    for mine, other in zip(saved.parameters(), on_cpu.agent.network.parameters(), strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-2, atol=1e-3)


def test_two_workers_train_hosts_on_two_devices(tmp_path: Path):
    found = tiny_run(tmp_path, devices=["pretend:0", "pretend:1"], rounds=1)
    assert devices_of(found.agent.network) == [FIRST]
    assert found.round == 1
