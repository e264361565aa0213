"""Batches: their size is the task's, every example counts once, the key decides their order."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from esper.growth.blueprints.catalogue import default_catalogue
from esper.tolaria.data.splits import DataSplits
from esper.tolaria.engine.batches import LoaderSource, TensorSource
from esper.tolaria.engine.population import LoopedPopulation
from esper.tolaria.tasks import all_tasks
from helpers import small_digits


@pytest.mark.parametrize("name", all_tasks())
def test_004_m17_a_task_says_how_large_its_batches_are(name):
    x, y = torch.zeros(30, 3, 32, 32), torch.zeros(30, dtype=torch.int64)
    data = DataSplits(x, y, x, y, x, y)
    task = replace(all_tasks()[name], batch=7, val_batch=11, batches_per_epoch=None)
    source = task.recipe(data, default_catalogue()).data
    assert [len(target) for _, target in source.train_batches(0)] == [7, 7, 7, 7, 2]
    assert [len(target) for _, target in source.val_batches()] == [11, 11, 8]
    sizes = []
    network = torch.nn.Flatten(2)
    network.register_forward_hook(lambda module, args, output: sizes.append(len(output)))
    blind = replace(task, score=lambda output, target: torch.zeros(()))
    blind.score_on(network, x, y)
    assert sizes == [11, 11, 8]


def test_004_m17_loaders_of_the_user_keep_their_batches():
    batches = [(torch.zeros(n, 1), torch.zeros(n)) for n in (5, 2)]
    source = LoaderSource(batches, batches[::-1])
    assert [len(target) for _, target in source.train_batches(0)] == [5, 2]
    assert [len(target) for _, target in source.val_batches()] == [2, 5]


def test_d20_hosts_are_measured_on_all_of_validation_every_example_counting_once():
    task, data = small_digits(train=64, val=297)
    recipes = [
        replace(task, val_batch=size).recipe(data, default_catalogue()) for size in (297, 290)
    ]
    whole, cut = (LoopedPopulation(recipe, [1, 2]) for recipe in recipes)
    everybody = np.ones((1, 3), dtype=bool)
    for env in np.arange(2):
        one, other = (population.evaluate(env[None], everybody) for population in (whole, cut))
        assert one.samples == other.samples == 297
        assert other.loss == pytest.approx(one.loss, rel=1e-6)
        assert other.score == pytest.approx(one.score, rel=1e-6)


def test_d21_an_epoch_is_every_example_once_and_the_key_decides_order_and_augmentation():
    x, y = torch.arange(10.0)[:, None], torch.arange(10)

    def augment(inputs, generator):
        return inputs + torch.rand(inputs.shape, generator=generator)

    source = TensorSource((x, y), (x, y), batch=4, augment=augment)
    first, again, other = (list(source.train_batches(key)) for key in (1, 1, 2))
    assert [len(target) for _, target in first] == [4, 4, 2]
    for epoch in (first, other):
        assert sorted(torch.cat([target for _, target in epoch]).tolist()) == list(range(10))
    inputs = [torch.cat([batch for batch, _ in epoch]) for epoch in (first, again, other)]
    assert torch.equal(inputs[0], inputs[1])
    assert not torch.equal(inputs[0].sort(0).values, inputs[2].sort(0).values)
