"""What advice looks at, and what that costs."""

from dataclasses import replace

import pytest
import torch

from esper.growth import BlueprintCatalogue, default_catalogue
from esper.leyline import ConfigError, draw_key
from esper.tamiyo import StaticController
from esper.tolaria import (
    TRAINING_COST,
    GrowthEnv,
    HostRecipe,
    LoopedPopulation,
    TrialRules,
    advise,
    find_task,
    train,
)
from esper.tolaria.advice import RATES, Sample, check_extra
from esper.tolaria.starvation import starvation
from helpers import small_digits

KEY = 3
STEPS = 30


@pytest.fixture(scope="module")
def trained() -> HostRecipe:
    """A digits host that was trained to its end on all of the data."""
    task, data = small_digits(train=1200)
    rules = TrialRules(STEPS, counterfactuals=False, keep_best=False, population="fused")
    recipe = task.recipe(data)
    (host,) = train(recipe, [KEY], rules, StaticController(), task=task.name, attribute=False)
    return replace(recipe, weights={KEY: host.model.state_dict()})


def test_advice_costs_about_a_tenth_of_the_extra_budget(trained: HostRecipe) -> None:
    advice = advise(trained, KEY, extra=0.3, epochs=STEPS + 1)
    assert 0.02 < advice.share < 0.15
    assert advice.verdict == "grow"
    assert len(advice.findings.candidates) == 9
    usual = advice.findings.usual
    assert usual is not None
    assert (usual.module, usual.blueprint) == ("blocks.0", "widen_double")


def test_its_cost_is_what_was_run(trained: HostRecipe, monkeypatch: pytest.MonkeyPatch) -> None:
    """Examples that went through the host are counted where they come from; without candidates
    that is all there is to pay for."""
    given = {"train": 0, "val": 0}
    own_train, own_val = Sample.train_batches, Sample.val_batches

    def counting(self, key):
        for batch in own_train(self, key):
            given["train"] += TRAINING_COST * len(batch[0]) if self.batches else 0
            yield batch

    def counting_val(self):
        for batch in own_val(self):
            given["val"] += len(batch[0])
            yield batch

    monkeypatch.setattr(Sample, "train_batches", counting)
    monkeypatch.setattr(Sample, "val_batches", counting_val)
    monkeypatch.setattr("esper.tolaria.advice.TRIALS", ((1, 1, 1),))
    only = BlueprintCatalogue([default_catalogue()[default_catalogue().index("norm")]])
    advice = advise(replace(trained, catalogue=only), KEY, extra=0.3, epochs=STEPS + 1)
    size = trained.data.size()
    budget = 0.3 * (STEPS + 1) * (TRAINING_COST * size.train + size.val) * advice.host_macs
    passes = advice.share * budget / advice.host_macs
    # One piece to see the targets, 512 examples for rho, and next to nothing for the trials.
    expected = given["train"] + given["val"] - 16 + 512
    assert passes == pytest.approx(expected, rel=0.02)


def test_more_budget_buys_longer_trials_not_dearer_advice(
    trained: HostRecipe, monkeypatch: pytest.MonkeyPatch
) -> None:
    plans = []
    own = GrowthEnv.try_candidates
    monkeypatch.setattr(
        GrowthEnv,
        "try_candidates",
        lambda self, plan, envs: plans.append(plan) or own(self, plan, envs),
    )
    found = [advise(trained, KEY, extra=0.3, epochs=n) for n in (STEPS + 1, 60, 20 * STEPS)]
    assert all(each.share < 0.1 for each in found[1:])
    short, middle, long = ((plan.steps, plan.batch, plan.val_samples) for plan in plans)
    assert short == (4, 16, 64)
    assert short < middle < long == (36, 64, 512)


def test_a_small_budget_tries_fewer_candidates(trained: HostRecipe) -> None:
    advice = advise(trained, KEY, extra=0.3, epochs=4)
    blueprints = {each.blueprint for each in advice.findings.candidates}
    assert blueprints == {"widen_double"}


def test_rho_is_that_of_the_network_as_it_came(trained: HostRecipe) -> None:
    advice = advise(trained, KEY, extra=0.3, epochs=STEPS + 1)
    host = LoopedPopulation(trained, [KEY]).networks[0].host.eval()
    batches = list(trained.data.train_batches(draw_key(KEY, "cooling", 0)))
    with torch.no_grad():
        logits = torch.cat([host(x) for x, _ in batches])[:512].double()
    rho = starvation(logits, torch.cat([y for _, y in batches])[:512])
    assert advice.findings.rho == pytest.approx(float(rho), rel=1e-4)
    assert 0.0 < advice.findings.tau < 1.0


def test_continuing_is_what_a_few_steps_of_a_plain_loop_bring(trained: HostRecipe) -> None:
    found = advise(trained, KEY, extra=0.3, epochs=STEPS + 1).findings.continued
    population = LoopedPopulation(trained, [KEY])
    host, (optimizer,) = population.networks[0].host, population.optimizers
    x, y = trained.data.val  # type: ignore[attr-defined]

    def loss() -> float:
        host.eval()
        with torch.no_grad():
            return float(torch.nn.functional.cross_entropy(host(x), y))

    before = loss()
    host.train()
    falls = {}
    batches = list(trained.data.train_batches(draw_key(KEY, "shuffle", 0)))
    state = {name: value.clone() for name, value in host.state_dict().items()}
    for steps in range(4, len(batches) + 1):
        host.load_state_dict(state)
        optimizer.state.clear()
        host.train()
        for i, (inputs, target) in enumerate(batches[:steps]):
            share = (i + 0.5) / steps
            rate = RATES[0] + (RATES[1] - RATES[0]) * share
            for group in optimizer.param_groups:
                group["lr"] = find_task("digits").learning_rate * rate
            host.zero_grad()
            torch.nn.functional.cross_entropy(host(inputs), target).backward()
            optimizer.step()
        falls[steps] = before - loss()
    nearest = min(falls.values(), key=lambda fall: abs(fall - (found.fall or 0.0)))
    assert found.fall == pytest.approx(nearest, abs=1e-5)


@pytest.mark.parametrize("extra", [0.0, 0.03, -1.0, float("nan"), float("inf")])
def test_a_budget_that_is_none_is_refused(extra: float) -> None:
    with pytest.raises(ConfigError, match=r"give 0\.034 or more"):
        check_extra(extra, 30)
    check_extra(0.034, 30)
