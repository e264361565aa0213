import numpy as np
import pytest
import torch

from esper.growth.blueprints.catalogue import default_catalogue
from esper.growth.lifecycle import germinate
from esper.growth.slot_table import SlotTable
from esper.leyline import (
    BLEND_NAMES,
    IS_LIVE,
    InvalidStateMachineError,
    LifecycleOp,
    SeedStage,
)
from esper.leyline.growth_settings import GrowthSettings
from esper.tamiyo.policy.action_masks import (
    GrowthLimits,
    MaskedCategorical,
    compute_action_masks,
    usable_blueprints,
)

RULES = GrowthSettings(steps=25)
RUNNING = np.ones(1, dtype=bool)


def limits(**changes: object) -> GrowthLimits:
    settings: dict[str, object] = {
        "fits": np.array([[False, True, True], [False, True, False]]),
        "params": np.array([[0, 10, 30], [0, 10, 0]]),
        "macs": np.array([[0, 5, 50], [0, 5, 0]]),
    }
    return GrowthLimits(**{**settings, **changes})  # type: ignore[arg-type]


def table_at(*stages: SeedStage) -> SlotTable:
    table = SlotTable.empty(1, 2)
    for slot, stage in enumerate(stages):
        if stage != SeedStage.DORMANT:
            germinate(table, 0, slot, blueprint=1, blend=0, params=10, macs=5, score=0.0)
            table.stage[0, slot] = stage
            table.epochs_total[0, slot] = 1
            table.contribution[0, slot] = 2.0
    table.noise[:] = 2.0
    return table


def ops(table: SlotTable, **changes: object) -> set[str]:
    masks = compute_action_masks(table, limits(**changes), RULES, RUNNING)
    return {op.name for op in LifecycleOp if masks.op[0, op]}


D, T, B, H, F = (
    SeedStage.DORMANT,
    SeedStage.TRAINING,
    SeedStage.BLENDING,
    SeedStage.HOLDING,
    SeedStage.FOSSILIZED,
)


@pytest.mark.parametrize(
    ("stages", "expected"),
    [
        ((D, D), {"WAIT", "GERMINATE"}),
        ((T, D), {"WAIT", "GERMINATE", "CULL"}),
        ((T, T), {"WAIT", "CULL"}),
        ((SeedStage.GERMINATED, B), {"WAIT", "CULL"}),
        ((H, B), {"WAIT", "CULL", "FOSSILIZE"}),
        ((F, F), {"WAIT"}),
        ((F, SeedStage.EMBARGOED), {"WAIT"}),
        ((SeedStage.RESETTING, SeedStage.CULLED), {"WAIT"}),
    ],
)
def test_ops_by_stage(stages: tuple[SeedStage, SeedStage], expected: set[str]) -> None:
    assert ops(table_at(*stages)) == expected


def test_culling_needs_an_age_of_one() -> None:
    table = table_at(T, F)
    table.epochs_total[0, 0] = 0
    assert ops(table) == {"WAIT"}


@pytest.mark.parametrize("contribution", [np.nan, 0.9, -1.0])
def test_fossilising_needs_its_gate(contribution: float) -> None:
    table = table_at(H, F)
    table.contribution[0, 0] = contribution
    assert ops(table) == {"WAIT", "CULL"}


def test_limits_on_seeds_parameters_and_multiply_adds() -> None:
    table = table_at(F, D)
    assert ops(table) == {"WAIT", "GERMINATE"}
    assert ops(table, max_seeds=1) == {"WAIT"}
    assert ops(table, max_params=20) == {"WAIT", "GERMINATE"}
    assert ops(table, max_params=19) == {"WAIT"}
    assert ops(table, max_macs=9) == {"WAIT"}


def test_blueprints_are_masked_per_slot_by_fit_and_by_what_is_left() -> None:
    table = table_at(D, D)
    masks = compute_action_masks(table, limits(), RULES, RUNNING)
    assert masks.blueprint[0].tolist() == [[False, True, True], [False, True, False]]
    tight = compute_action_masks(table, limits(max_params=29), RULES, RUNNING)
    assert tight.blueprint[0].tolist() == [[False, True, False], [False, True, False]]


def test_slots_are_masked_per_op() -> None:
    masks = compute_action_masks(table_at(H, D), limits(), RULES, RUNNING)
    assert masks.slot[0].tolist() == [[True, True], [False, True], [True, False], [True, False]]
    assert masks.blend.shape == (1, len(BLEND_NAMES))
    assert masks.blend.all()


def test_an_environment_that_is_over_can_only_wait() -> None:
    masks = compute_action_masks(table_at(H, D), limits(), RULES, ~RUNNING)
    assert masks.op.tolist() == [[True, False, False, False]]


def test_the_blueprint_that_grows_nothing_is_never_usable() -> None:
    catalogue = default_catalogue()
    usable = usable_blueprints(catalogue, np.ones((1, len(catalogue)), dtype=bool))
    assert usable.sum() == len(catalogue) - 1
    assert not usable[0, catalogue.index("noop")]


def test_every_live_stage_can_be_culled() -> None:
    for stage in SeedStage:
        if stage not in (SeedStage.UNKNOWN, SeedStage.DORMANT):
            assert ("CULL" in ops(table_at(stage, F))) == bool(IS_LIVE[stage])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_masked_categorical_gives_illegal_actions_nothing(dtype: torch.dtype) -> None:
    logits = torch.tensor([[3.0, -2.0, 50.0, 0.5]], dtype=dtype, requires_grad=True)
    mask = torch.tensor([[True, True, False, True]])
    distribution = MaskedCategorical(logits, mask)
    assert float(distribution.probs[0, 2].detach()) < 1e-6
    assert float(distribution.probs.sum().detach()) == pytest.approx(1.0, abs=2e-2)
    (distribution.log_prob(torch.tensor([0])) + distribution.entropy()).sum().backward()
    assert logits.grad is not None
    assert logits.grad[0, 2] == 0.0
    assert (logits.grad[0, [0, 1, 3]] != 0).any()


def test_masked_categorical_equals_torch_on_the_legal_part() -> None:
    logits = torch.randn(5, 7)
    mask = torch.rand(5, 7) > 0.4
    mask[:, 0] = True
    mask[0] = torch.tensor([True] + [False] * 6)
    ours = MaskedCategorical(logits, mask)
    for row in range(5):
        reference = torch.distributions.Categorical(logits=logits[row][mask[row]])
        for rank, action in enumerate(mask[row].nonzero()[:, 0]):
            expected = reference.log_prob(torch.tensor(rank))
            assert torch.allclose(ours.log_prob(action.expand(5))[row], expected, atol=1e-6)
        legal = int(mask[row].sum())
        expected = reference.entropy() / np.log(legal) if legal > 1 else torch.tensor(0.0)
        assert torch.allclose(ours.entropy()[row], expected, atol=1e-6)


def test_entropy_is_one_when_uniform_and_zero_with_one_choice() -> None:
    logits = torch.zeros(2, 6, requires_grad=True)
    mask = torch.tensor([[True] * 4 + [False] * 2, [False] * 5 + [True]])
    entropy = MaskedCategorical(logits, mask).entropy()
    assert entropy.tolist() == pytest.approx([1.0, 0.0])
    entropy[1].backward()
    assert torch.equal(logits.grad[1], torch.zeros(6))  # type: ignore[index]


def test_sampling_follows_the_probabilities_and_the_generator() -> None:
    logits = torch.tensor([[0.0, 1.0, 2.0, 3.0]]).expand(20_000, 4)
    mask = torch.tensor([[True, False, True, True]]).expand(20_000, 4)
    distribution = MaskedCategorical(logits, mask)
    draw = distribution.sample(torch.Generator().manual_seed(0))
    assert torch.equal(draw, distribution.sample(torch.Generator().manual_seed(0)))
    shares = torch.bincount(draw, minlength=4) / 20_000
    assert shares[1] == 0
    assert torch.allclose(shares, distribution.probs[0], atol=0.015)
    assert distribution.mode().unique().tolist() == [3]


def test_validation_catches_what_cannot_be_and_can_be_switched_off() -> None:
    empty = torch.tensor([[True, True], [False, False]])
    with pytest.raises(InvalidStateMachineError, match="1 of 2 rows"):
        MaskedCategorical(torch.zeros(2, 2), empty)
    with pytest.raises(ValueError, match="1 NaN, 1 infinite"):
        MaskedCategorical(torch.tensor([[torch.nan, torch.inf]]), torch.ones(1, 2).bool())
    with pytest.raises(ValueError, match="differ in shape"):
        MaskedCategorical(torch.zeros(2, 2), torch.ones(2, 3).bool())
    MaskedCategorical(torch.zeros(2, 2), empty, validate=False)
