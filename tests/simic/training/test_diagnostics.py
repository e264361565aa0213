"""What the running loop finds out about learning, and tells: forced faults and their records."""

import math

import pytest
import torch

from esper.api.training import resume_ppo
from esper.leyline import HEAD_NAMES
from esper.leyline.events import AnomalyDetected
from esper.simic.agent.metrics import PPOUpdateMetrics
from esper.simic.telemetry.anomaly_detector import (
    AnomalyReport,
    Escalation,
)
from esper.simic.training.state import TrainState
from esper.tamiyo.policy import masked_categorical
from training_support import analytic_state, play, rows, tiny_run, tiny_task

CRITIC = "value_head.0.weight"


def tamper(state: TrainState, name: str, change, rounds: tuple[int, ...]) -> None:
    """Let `change` have the gradient of a parameter in some rounds."""
    parameter = state.agent.network.get_parameter(name)
    parameter.register_hook(lambda grad: change(grad) if state.round in rounds else grad)


# Every update is an anomaly.
ALARM = {"ppo.ratio_explosion": 0.5, "anomalies.patience": 1}


def anomalies(history) -> list[tuple[int, str, str | None]]:
    return [
        (e.step, e.anomaly, e.worst_head) for e in history.events if isinstance(e, AnomalyDetected)
    ]


# --- the health of gradients -----------------------------------------------------------------


def test_004_c6_rounds_tell_of_the_health_of_gradients_and_a_dead_tensor_lowers_it():
    config, state = analytic_state(rounds=2)
    tamper(state, CRITIC, torch.zeros_like, rounds=(1,))
    _, again = analytic_state(rounds=2)
    one, two = (play(config, each).of("round") for each in (state, again))
    tensors = len(list(state.agent.network.parameters()))
    assert one[0] == two[0]
    assert one[1]["gradient_health"] == pytest.approx(two[1]["gradient_health"] - 0.5 / tensors)
    assert one[1]["vanishing_tensors"] == two[1]["vanishing_tensors"] + 1
    share = state.agent.network.get_parameter(CRITIC).numel()
    share /= sum(p.numel() for p in state.agent.network.parameters())
    zeros = one[1]["zero_gradient_fraction"] - two[1]["zero_gradient_fraction"]
    assert 0.5 * share < zeros <= share  # some of its entries were 0 anyway


@pytest.mark.parametrize(("clip", "explodes"), [(1e-5, True), (1e3, False)])
def test_004_h14_what_explodes_in_a_run_depends_on_its_clip_norm(clip, explodes):
    history = play(*analytic_state(rounds=1, **{"ppo.max_grad_norm": clip}))
    (row,) = history.of("round")
    assert (row["exploding_tensors"] > 0) == explodes
    assert (row["gradient_health"] < 0.9) == explodes


def test_gradients_that_explode_drift_away_from_their_mean_in_health_and_norm():
    config, state = analytic_state(rounds=4, **{"ppo.target_kl": 1e6})
    for name, _ in state.agent.network.named_parameters():
        tamper(state, name, lambda grad: 1e5 * grad + 1e3, rounds=(2, 3))
    history = play(config, state)
    health = [row["gradient_health"] for row in history.of("round")]
    assert min(health[:2]) > 0.9
    assert max(health[2:]) < 0.3
    told = anomalies(history)
    # Two rounds in a row, so that one noisy update does not cry wolf.
    assert (3, "gradient_health_drift", None) in told
    assert not any(name == "gradient_health_drift" for step, name, _ in told if step < 3)
    assert any(name == "gradient_norm_drift" for _, name, _ in told)


# --- after an anomaly ------------------------------------------------------------------------


def test_after_an_anomaly_five_rounds_are_recorded_in_detail_and_learn_the_same():
    config, state = analytic_state(rounds=8)
    _, quiet = analytic_state(rounds=8)

    def in_the_second(row, *, current_round, **settings):
        return AnomalyReport({"kl_spike": "forced"} if current_round == 2 else {})

    state.detector.check_all = in_the_second
    quiet.detector.check_all = lambda row, **settings: AnomalyReport()
    watched, plain = play(config, state), play(config, quiet)
    for kind in ("layer", "ratios"):
        assert {row["round"] for row in watched.of(kind)} == {2, 3, 4, 5, 6}
        assert not plain.of(kind)
    losses = [[r["policy_loss"] for r in history.of("round")] for history in (watched, plain)]
    assert losses[0] == losses[1]


def test_every_layer_is_told_with_its_gradient_before_clipping_and_summed_up():
    """Norms of layers add up to the norm before clipping, which here is far above the limit."""
    config, state = analytic_state(
        rounds=2, **{"ppo.max_grad_norm": 1e-3, "ppo.epochs": 1, "ppo.minibatches": 1}, **ALARM
    )
    tamper(state, CRITIC, torch.zeros_like, rounds=(1,))
    history = play(config, state)
    layers = {row["layer_name"]: row for row in history.of("layer", 1)}
    assert set(layers) == {name for name, _ in state.agent.network.named_parameters()}
    (row,) = history.of("round", 1)
    total = math.sqrt(sum(layer["grad_norm"] ** 2 for layer in layers.values()))
    assert total == pytest.approx(row["grad_norm"], rel=1e-5)
    assert total > 1e-2
    dead = [name for name, layer in layers.items() if layer["zero_fraction"] > 0.9]
    assert CRITIC in dead
    assert row["dead_layers"] == len(dead)
    assert row["layer_gradient_health"] == pytest.approx(1 - 0.5 * len(dead) / len(layers))


def test_004_gap1_the_ratios_of_a_closer_look_name_heads_and_their_worst_decisions():
    limits = {"ppo.ratio_explosion": 1.01, "ppo.ratio_collapse": 0.99, "ppo.target_kl": 100.0}
    limits |= {"ppo.learning_rate": 0.01, "anomalies.patience": 1}
    config, state = analytic_state(rounds=2, **limits)
    history = play(config, state)
    assert not history.of("ratios", 0)
    (summary,) = history.of("ratios", 1)
    examples = history.of("ratio", 1)
    assert 0 < len(examples) <= sum(summary[f"{head}_outliers"] for head in HEAD_NAMES)
    for example in examples:
        assert not 0.99 <= example["ratio"] <= 1.01
        assert example["head"] in HEAD_NAMES
        assert example["index"] < config.envs * 16
    distances = [abs(math.log(example["ratio"])) for example in examples]
    assert distances == sorted(distances, reverse=True)
    assert (examples[0]["head"], examples[0]["ratio"]) == (
        summary["worst_head"],
        summary["worst_ratio"],
    )
    assert summary["log_prob_change_max"] == pytest.approx(distances[0])


@pytest.mark.parametrize("head", HEAD_NAMES)
@pytest.mark.parametrize(
    ("entropy", "expected"), [(0.05, "entropy_collapse"), (0.2, "entropy_low"), (0.5, None)]
)
def test_004_h1_the_loop_tells_of_the_entropy_of_each_head(head, entropy, expected):
    entropies = {f"{name}_entropy": 0.5 for name in HEAD_NAMES} | {f"{head}_entropy": entropy}
    told, level = anomalies_of_two_updates(entropies)
    assert told == ([] if expected is None else [(1, expected, head)])
    assert level == ("NORMAL" if expected is None else "DEBUG")


@pytest.mark.parametrize(("kl", "expected"), [(0.2, "kl_spike"), (0.6, "kl_extreme"), (0.05, None)])
def test_004_h2_the_loop_tells_of_kl(kl, expected):
    told, _ = anomalies_of_two_updates({"approx_kl_max": kl})
    at_once = 0 if expected == "kl_extreme" else 1
    assert told == ([] if expected is None else [(at_once, expected, None)])


def anomalies_of_two_updates(values: dict[str, float]):
    """What the loop tells about two equal updates, and whether it looks closer afterwards."""
    config, state = analytic_state(rounds=2)
    state.agent.update = lambda buffer, generator, detailed: PPOUpdateMetrics(
        steps=len(buffer), values=values
    )
    history = play(config, state)
    return anomalies(history), history.of("round")[-1]["telemetry_level"]


def test_d7_the_lifecycle_does_not_depend_on_telemetry(tmp_path, monkeypatch):
    wild = {"ppo.learning_rate": 0.3, "ppo.target_kl": 100.0}
    tiny_run(tmp_path / "detailed", rounds=3, **wild)
    monkeypatch.setattr(Escalation, "note", lambda self, anomaly: None)
    tiny_run(tmp_path / "not", rounds=3, **wild)
    detailed, without = (rows(tmp_path / name / "metrics.jsonl") for name in ("detailed", "not"))
    assert {r["kind"] for r in detailed} > {r["kind"] for r in without} == {"step", "round"}
    steps = [[r for r in found if r["kind"] == "step"] for found in (detailed, without)]
    assert steps[0] == steps[1]
    outcomes = [(tmp_path / name / "outcomes.jsonl").read_bytes() for name in ("detailed", "not")]
    assert outcomes[0] == outcomes[1]


# --- numbers that are not finite -------------------------------------------------------------


@pytest.mark.parametrize(
    ("value", "column"), [(math.nan, "nan_in_gradients"), (math.inf, "inf_in_gradients")]
)
def test_004_m13_a_skipped_update_names_what_is_broken_and_the_norm_before_clipping(value, column):
    config, state = analytic_state(rounds=3, **{"ppo.max_grad_norm": 1e-3, "ppo.target_kl": 100.0})
    seen = []

    def break_the_third(grad):
        seen.append(grad)
        return torch.full_like(grad, value) if len(seen) == 3 else grad

    tamper(state, CRITIC, break_the_third, rounds=(1,))
    history = play(config, state)
    (report,) = history.of("stability")
    (row,) = history.of("round", 1)
    assert report["round"] == 1
    assert report["skipped"] == row["skipped"] == f"grad_norm is {value}"
    broken = {name: report[name] for name in report if name.startswith(("nan_", "inf_"))}
    assert broken == dict.fromkeys(broken) | {column: CRITIC}
    assert report["pre_clip_grad_norm"] == row["grad_norm_max"] > config.ppo.max_grad_norm
    assert report["max_weight"] < 10
    assert row["optimizer_steps"] == 2
    assert (1, "numerical_instability", None) in anomalies(history)
    # The parameters are sound, and the next round is recorded in detail.
    assert history.of("round", 2)[0]["skipped"] is None
    assert history.of("layer", 2)


def test_a_sound_run_reports_nothing_broken():
    assert not play(*analytic_state(rounds=2)).of("stability")


@pytest.mark.parametrize(
    ("setting", "value", "anomaly"),
    [
        ("ppo.ratio_explosion", 0.5, "ratio_explosion"),
        ("ppo.ratio_collapse", 4.9, "ratio_collapse"),
        ("anomalies.entropy_low", 0.1, "entropy_low"),
        ("anomalies.kl_spike", -1.0, "kl_spike"),
        ("anomalies.value_phases", [[1.0, -9.0]], "value_collapse"),
    ],
)
def test_settings_of_a_run_decide_what_is_an_anomaly(setting, value, anomaly):
    def found(**flags):
        state = analytic_state(rounds=1, **{"anomalies.patience": 1}, **flags)
        return anomaly in [name for _, name, _ in anomalies(play(*state))]

    assert found() != found(**{setting: value})


def test_a_resumed_run_keeps_its_thresholds(tmp_path):
    tiny_run(tmp_path / "run", rounds=1, **{"ppo.ratio_explosion": 0.5})
    resume_ppo(tmp_path / "run", task=tiny_task(), rounds=2)
    # Two updates in a row, one of them before the checkpoint.
    assert rows(tmp_path / "run" / "metrics.jsonl")[-1]["anomalies"] == "ratio_explosion"


@pytest.mark.parametrize("checks", [True, False])
def test_a_setting_switches_the_checks_of_masks(checks, monkeypatch):
    calls = []
    monkeypatch.setattr(masked_categorical, "_check", lambda *arguments: calls.append(arguments))
    play(*analytic_state(rounds=1, **{"ppo.validate_masks": checks}))
    assert bool(calls) == checks
