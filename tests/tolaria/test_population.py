from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from esper.growth.blueprints.catalogue import default_catalogue
from esper.growth.grown_module import keyed
from esper.growth.hosts import CNNHost
from esper.leyline import ConfigError, SeedStage, draw_key
from esper.tolaria.engine.batches import LoaderSource, TensorSource
from esper.tolaria.engine.objectives import (
    LOSSES,
    SCORES,
    accuracy,
    binary_accuracy,
    cross_entropy,
    find_objective,
    negative_mse,
    random_guess_loss,
)
from esper.tolaria.engine.population import LoopedPopulation
from helpers import digits_env, plant, small_digits


def population(keys: list[int]) -> LoopedPopulation:
    task, data = small_digits()
    return LoopedPopulation(task.recipe(data, default_catalogue()), keys)


def test_training_equals_a_loop_written_by_hand() -> None:
    _, data = small_digits()
    ours = population([5])
    with keyed(draw_key(5, "host")):
        host = CNNHost(num_classes=10, n_blocks=3, base_channels=2, in_channels=1)
    optimizer = torch.optim.AdamW(host.parameters(), lr=1e-2, weight_decay=0.0, fused=True)
    for step in range(3):
        readings = ours.train_epoch(np.array([True]), step)
        generator = torch.Generator().manual_seed(draw_key(5, "shuffle", step))
        losses = []
        for rows in torch.randperm(128, generator=generator).split(64):
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(host(data.train_x[rows]), data.train_y[rows])
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        assert readings.loss[0] == pytest.approx(np.mean(losses), rel=1e-6)
    for mine, theirs in zip(ours.networks[0].host.parameters(), host.parameters(), strict=True):
        assert torch.equal(mine, theirs)
    evaluation = ours.evaluate(np.array([0]), np.ones((1, 3), dtype=bool))
    host.eval()
    output = host(data.val_x).detach()
    assert evaluation.loss[0] == pytest.approx(
        float(nn.functional.cross_entropy(output, data.val_y)), rel=1e-6
    )
    right = (output.argmax(1) == data.val_y).float().mean()
    assert evaluation.score[0] == pytest.approx(100 * float(right), rel=1e-6)
    assert evaluation.samples == len(data.val_x)


def test_a_host_does_not_depend_on_its_neighbours() -> None:
    alone, together = population([7]), population([3, 7, 9])
    running = np.array([True, True, True])
    for step in range(2):
        alone.train_epoch(np.array([True]), step)
        together.train_epoch(running, step)
    for mine, theirs in zip(
        alone.networks[0].parameters(), together.networks[1].parameters(), strict=True
    ):
        assert torch.equal(mine, theirs)


def test_every_coalition_is_evaluated_on_the_same_data_in_one_pass() -> None:
    pop = population([1])
    pop.germinate(0, 0, pop.template.catalogue.index("branch"), 0, key=1)
    pop.germinate(0, 1, pop.template.catalogue.index("conv_light"), 0, key=2)
    with torch.no_grad():
        for slot in (0, 1):
            for p in pop.networks[0].seed_parameters(slot):
                p.add_(0.3 * torch.randn_like(p))
            pop.set_blend(0, slot, SeedStage.HOLDING, 1.0)
    passes = 0
    batches = pop.recipe.data.val_batches

    def counted():  # type: ignore[no-untyped-def]
        nonlocal passes
        passes += 1
        return batches()

    pop.recipe.data.val_batches = counted  # type: ignore[method-assign]
    coalitions = np.array([[1, 1, 1], [0, 1, 1], [1, 0, 1], [0, 0, 1]], dtype=bool)
    evaluation = pop.evaluate(np.zeros(len(coalitions), dtype=int), coalitions)
    assert passes == 1
    # Taking a seed out for good gives the same as leaving it out of the coalition.
    pop.remove(0, 0)
    assert pop.evaluate(np.array([0]), coalitions[:1]).loss[0] == evaluation.loss[1]
    pop.remove(0, 1)
    assert pop.evaluate(np.array([0]), coalitions[:1]).loss[0] == evaluation.loss[3]
    assert len(set(evaluation.loss)) == 4


def test_snapshots_bring_one_host_back_and_leave_the_others() -> None:
    pop = population([1, 2])
    pop.train_epoch(np.ones(2, dtype=bool), 0)
    saved = pop.snapshot(np.array([0]))
    expected = [p.detach().clone() for p in pop.networks[0].parameters()]
    pop.train_epoch(np.ones(2, dtype=bool), 1)
    other = [p.detach().clone() for p in pop.networks[1].parameters()]
    pop.restore(np.array([0]), saved)
    for network, params in ((pop.networks[0], expected), (pop.networks[1], other)):
        assert all(torch.equal(a, b) for a, b in zip(network.parameters(), params, strict=True))


def test_clipping_keeps_host_and_seeds_apart() -> None:
    task, data = small_digits()
    recipe = replace(task.recipe(data, default_catalogue()), max_grad_norm=1e-3)
    pop = LoopedPopulation(recipe, [0])
    host, norms = pop.networks[0].host_parameters(), list[float]()

    def note(*_: Any) -> None:
        norms.append(float(torch.stack([p.grad.norm() for p in host if p.grad is not None]).norm()))

    pop.optimizers[0].register_step_pre_hook(note)
    pop.train_epoch(np.ones(1, dtype=bool), 0)
    assert 0.0 < max(norms) <= 1.001e-3
    assert all(p.grad is None for p in host), "their memory is free for snapshots"
    with pytest.raises(ConfigError, match="max_grad_norm must be above 0"):
        replace(recipe, max_grad_norm=0.0)


@pytest.mark.parametrize(("half", "dtype"), [("bf16", torch.bfloat16), ("fp16", torch.float16)])
def test_half_precision_is_for_the_products_and_what_is_learnt_stays_float32(
    half: str, dtype: torch.dtype
) -> None:
    task, data = small_digits()
    found = []
    for precision in ("fp32", half):
        recipe = replace(task, precision=precision).recipe(data, default_catalogue())
        pop, seen = LoopedPopulation(recipe, [0]), []
        plant(pop.networks[0], 0, "conv_light", SeedStage.BLENDING, 0.5)
        pop.networks[0].host.blocks[0].register_forward_hook(
            lambda module, args, output, seen=seen: seen.append(output.dtype)
        )
        trained = pop.train_epoch(np.ones(1, dtype=bool), 0)
        measured = pop.evaluate(np.array([0]), np.ones((1, 3), dtype=bool))
        assert set(seen) == {torch.float32 if precision == "fp32" else dtype}
        assert {p.dtype for p in pop.networks[0].parameters()} == {torch.float32}
        found.append((trained.loss[0], measured.loss[0]))
    assert found[0] != found[1]
    np.testing.assert_allclose(*found, rtol=0.02)
    with pytest.raises(ConfigError, match="precision must be one of fp32, bf16, fp16, got 'fp8'"):
        replace(task, precision="fp8").recipe(data)


def test_gradients_are_read_before_they_are_clipped() -> None:
    task, data = small_digits()
    ratios = []
    for max_norm in (None, 1e-3):
        recipe = replace(task.recipe(data, default_catalogue()), max_grad_norm=max_norm)
        recipe = replace(recipe, optimizer=lambda params: torch.optim.SGD(params, lr=0.0))
        pop = LoopedPopulation(recipe, [0])
        pop.germinate(0, 1, recipe.catalogue.index("conv_light"), 0, key=1)
        pop.set_blend(0, 1, SeedStage.BLENDING, 0.5)
        ratios.append(pop.train_epoch(np.ones(1, dtype=bool), 0).seeds["gradient_ratio"][0, 1])
    assert ratios[0] == ratios[1] > 0.0


def test_multiply_adds_of_a_run_are_counted() -> None:
    env = digits_env([1], max_steps=2)
    env.reset()
    spent = env.garden.train_macs[0]
    assert spent == env.garden.host_macs * (3 * 128 + 297)


def test_tensor_source_shuffles_by_key_and_limits_an_epoch() -> None:
    x, y = torch.arange(10.0)[:, None], torch.arange(10)
    source = TensorSource((x, y), (x, y), batch=3, max_batches=2)
    first = [batch[1].tolist() for batch in source.train_batches(1)]
    assert first == [batch[1].tolist() for batch in source.train_batches(1)]
    assert first != [batch[1].tolist() for batch in source.train_batches(2)]
    assert [len(batch) for batch in first] == [3, 3]
    with pytest.raises(ConfigError, match="as many targets as inputs"):
        TensorSource((x, y[:5]), (x, y), batch=3)


@pytest.mark.parametrize(
    ("train", "message"),
    [
        ([], "train_loader is empty"),
        ([torch.zeros(2)], "must yield pairs"),
        ([(torch.zeros(3, 1), torch.zeros(2))], "3 inputs with 2 targets"),
    ],
)
def test_bad_loaders_are_refused(train: list[object], message: str) -> None:
    good = [(torch.zeros(2, 1), torch.zeros(2))]
    with pytest.raises(ConfigError, match=message):
        LoaderSource(train, good)
    with pytest.raises(ConfigError, match=message.replace("train_", "val_")):
        LoaderSource(good, train)


def test_objectives() -> None:
    logits = torch.tensor([[2.0, 0.0], [0.0, 1.0], [3.0, 0.0], [1.0, 0.0]])
    target = torch.tensor([0, 1, 1, 0])
    assert float(accuracy(logits, target)) == 75.0
    assert float(accuracy(logits[None], target[None])) == 75.0
    assert float(cross_entropy(logits[None], target[None])) == pytest.approx(
        float(nn.functional.cross_entropy(logits, target))
    )
    assert float(binary_accuracy(torch.tensor([1.0, -1.0]), torch.tensor([1.0, 1.0]))) == 50.0
    assert float(negative_mse(torch.zeros(2), torch.ones(2))) == -100.0
    assert find_objective("loss", "mse", LOSSES) is LOSSES["mse"]
    assert find_objective("score", accuracy, SCORES) is accuracy
    with pytest.raises(ConfigError, match=r"no loss 'hinge'.*cross_entropy"):
        find_objective("loss", "hinge", LOSSES)
    assert random_guess_loss(cross_entropy, 10) == pytest.approx(2.302585)
    assert random_guess_loss(LOSSES["mse"], 10) is None


def test_several_hosts_are_measured_at_once_as_one_by_one() -> None:
    pop = population([1, 2, 3])
    for env, blueprint in ((0, "branch"), (2, "conv_light")):
        pop.germinate(env, 0, default_catalogue().index(blueprint), 0, key=env)
        pop.set_blend(env, 0, SeedStage.BLENDING, 0.6)
    envs = np.array([2, 0, 1, 0])
    present = np.array([[True] * 3, [True] * 3, [True] * 3, [False, True, True]])
    found = pop.evaluate(envs, present)
    for k, env in enumerate(envs):
        alone = pop.evaluate(envs[k : k + 1], present[k : k + 1])
        assert (alone.loss[0], alone.score[0]) == (found.loss[k], found.score[k])
        assert found.alpha[k, 0] == (0.0 if env == 1 else 0.6)
    saved = pop.snapshot(np.array([2, 0]))
    pop.remove(0, 0)
    pop.remove(2, 0)
    pop.restore(np.array([2, 0]), saved)
    again = pop.evaluate(envs, present)
    assert np.array_equal(again.loss, found.loss)
