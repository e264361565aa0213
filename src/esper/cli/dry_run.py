"""`--dry-run`: what each of the long commands would take."""

import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from esper.cli.rehearsal import Estimate, little_of, peak_bytes, rehearsed, seconds_per_mac

if TYPE_CHECKING:
    from esper.cli.grow_command import GrowSettings
    from esper.cli.learn_commands import RecordSettings
    from esper.cli.train_command import Workers
    from esper.proof import EvaluationSettings, Run
    from esper.simic.training import Cluster, TrainingConfig
    from esper.tamiyo import Controller
    from esper.tolaria import DataSplits, Task, TrialRules
    from esper.tuning import Plan
    from esper.tuning.plan import Base

TIMED = "the first epochs on all data were timed on this machine, as busy as it is now"
MEASURED = f"on a few batches, for all epochs; then {TIMED}"
ON_A_LITTLE = f"{MEASURED}; memory is the peak of that"


def grow_estimate(
    settings: "GrowSettings",
    task: "Task",
    data: "DataSplits",
    controller: "Controller",
    rules: "TrialRules",
) -> Estimate:
    """The growing arm is rehearsed; what the others cost follows from it. With --start trained all
    have the same budget, so nothing is rehearsed."""
    from esper.api import one_thread
    from esper.proof import host_size, training_macs

    with one_thread():
        cost = training_macs(task, data, host_size(task, data)[1], rules.steps)
        if settings.start == "trained":
            arms = _rescue_arms(settings, task, data, rules.steps, cost)
            how = f"{TIMED}; memory is the peak of that"
        else:
            arms = _fresh_arms(settings, task, data, controller, rules, cost)
            how = f"the growing network was trained {ON_A_LITTLE}"
        pace = seconds_per_mac(task.recipe(data), 1, rules, controller)
    names = ", ".join(arms)
    would = f"train {task.name} for {rules.steps + 1} epochs: {names}"
    return Estimate(would, str(settings.folder), pace * sum(arms.values()), peak_bytes(), how)


def _fresh_arms(
    settings: "GrowSettings",
    task: "Task",
    data: "DataSplits",
    controller: "Controller",
    rules: "TrialRules",
    cost: float,
) -> dict[str, float]:
    """The arms and their multiply-adds."""
    from esper.cli.retraining import ANEW, RANDOM, UNIFORM
    from esper.proof import Found
    from esper.tolaria import Budget

    grown, macs = rehearsed(task, data, controller, rules, settings.key)
    arms = {"grown": macs}
    # A network of the same shape from birth.
    anew = cost * grown.outcome.macs / grown.outcome.host_macs
    if settings.compare:
        arms["host alone"] = cost
    if settings.compare and settings.then is None:
        arms["from scratch"] = anew
    if settings.then == "retrain":
        arms[ANEW], spent = anew, macs + anew
        caps = Budget(params=settings.max_params, macs=settings.max_macs)
        found = Found.of(grown, task, data, caps)
        plans = {UNIFORM: found.uniform(int(spent)), RANDOM: found.random(int(spent))}
        for label, tried in plans.items() if settings.compare else []:
            if tried:  # The best of them is trained once more, for its record.
                arms[f"{label} of {len(tried)}"] = (len(tried) + 1) * spent
    return arms


def _rescue_arms(
    settings: "GrowSettings", task: "Task", data: "DataSplits", steps: int, cost: float
) -> dict[str, float]:
    from esper.cli.rescue import CONTINUE, COOLED, HOST, SCRATCH
    from esper.proof import Ways

    budget = settings.extra * cost
    arms = {HOST: cost, "grown": budget}
    tried = Ways(task, data, steps, settings.extra).from_scratch()
    if settings.compare:
        arms |= {CONTINUE: budget, COOLED: budget}
        if tried:
            arms[f"{SCRATCH} of {len(tried)}"] = (len(tried) + 1) * budget
    return arms


def evaluate_estimate(
    task: "Task",
    data: "DataSplits",
    before: "DataSplits | None",
    plan: "EvaluationSettings",
    out: Path,
    cpus: int = 1,
) -> Estimate:
    """All of it is rehearsed, tuning and controls included, on one key and one tuning key, here
    also if networks would be trained on the `cpus` of a cluster."""
    from esper.api import find_controller, one_thread
    from esper.proof import FIRST_TUNING_KEY, SIDE_BY_SIDE, TUNING_KEYS, evaluate
    from esper.tolaria import TrialRules, choose_population

    task = replace(task, precision=plan.precision)
    little, factor = little_of(task, data)
    known = None if before is None else little_of(task, before)[0]
    heard: list[tuple[str, int, Run]] = []

    def hear(label: str, run: "Run") -> None:
        tuning = run.outcome.key >= FIRST_TUNING_KEY
        heard.append((label, (plan.tuning_keys or TUNING_KEYS) if tuning else plan.keys, run))

    with one_thread():
        one = replace(plan, keys=1, tuning_keys=1, population="looped")
        evaluate(task, little, one, find_controller, before=known, tell=hear)
        kind = choose_population(task.recipe(data), plan.keys, plan.population)
        hosts = min(plan.keys, SIDE_BY_SIDE[kind])
        rules = TrialRules(plan.steps or task.steps, population=kind, schedule=task.schedule)
        grows = find_controller(plan.arms[-1])
        pace = seconds_per_mac(task.recipe(data), hosts, rules, grows)
    # The batches of a tiny network take longer than its multiply-adds say: how networks compare is
    # taken from the rehearsal, and how long the last arm takes from the epochs that were timed.
    last = [run for label, _, run in heard if label.split(" +")[0] == plan.arms[-1]]
    known_seconds = pace * factor * sum(run.outcome.train_macs for run in last)
    scale = known_seconds / sum(run.cpu_seconds for run in last)
    seconds = scale * sum(times * run.cpu_seconds for _, times, run in heard)
    networks, arms = sum(times for _, times, _ in heard), ", ".join(plan.arms)
    would = f"train {networks} networks on {task.name}, {kind}: {arms} on {plan.keys} keys, with "
    would += "all that they choose from and are compared with"
    how = f"every arm was trained on one key {ON_A_LITTLE}"
    if cpus > 1:
        how += f"; time is divided by the {cpus} CPUs of the cluster, as if none had to wait"
    return Estimate(would, str(out), seconds / cpus, peak_bytes(), how)


def record_estimate(settings: "RecordSettings", out: str) -> Estimate:
    """One episode is rehearsed, and the first epoch of all that are played side by side."""
    from esper.api import find_controller, one_thread
    from esper.growth import default_catalogue
    from esper.observatory import check_free
    from esper.simic.training import load_config
    from esper.tolaria import TrialRules, choose_population, data_root, find_task, make_env

    if settings.family is not None:
        return _of_family(f"record {settings.episodes} episodes", settings.family, out)
    task, config = find_task(settings.task), load_config(None, {"task": settings.task})
    who = find_controller(settings.controller, len(task.slots), default_catalogue())
    check_free(Path(out), overwrite=settings.overwrite)
    data, steps = task.load(data_root()), settings.steps or task.steps
    recipe, hosts = task.recipe(data), min(settings.episodes, config.envs)
    with one_thread():
        kind = choose_population(recipe, config.envs)
        rules = TrialRules(steps, keep_best=False, schedule=task.schedule, population=kind)
        _, macs = rehearsed(task, data, who, rules, settings.key)
        pace = seconds_per_mac(recipe, hosts, rules, who)
        make_env(task.recipe(little_of(task, data)[0]), range(hosts), rules).reset()
    would = (
        f"record {settings.episodes} episodes of {steps} steps of {who.name} on {task.name}, {kind}"
    )
    how = f"an episode was played {ON_A_LITTLE}"
    return Estimate(would, out, settings.episodes * macs * pace, peak_bytes(), how)


def _of_family(would: str, name: str, out: str) -> Estimate:
    """To know a host of a member is to train it and to keep it beside the data."""
    from esper.tolaria import find_family

    how = "the hosts of a family differ from round to round; a short run shows what they take"
    return Estimate(f"{would} on {find_family(name).name}", out, None, None, how)


def ppo_estimate(
    config: "TrainingConfig",
    out: Path,
    done: int,
    workers: "Workers",
    devices: Sequence[str] | None,
    cluster: "Cluster | None" = None,
) -> Estimate:
    """A whole round is rehearsed. Hosts scale with the data, the rest of a round does not. On a
    cluster nobody knows what its nodes need of memory."""
    from esper.api import episode_steps, find_controller, one_thread, rehearse_ppo
    from esper.tolaria import TrialRules, data_root, find_task

    rounds = config.rounds - done
    would = f"play {rounds} rounds of {config.envs} episodes"
    if config.family is not None:
        return _of_family(would, config.family, str(out))
    task = replace(find_task(config.task), precision=config.precision)
    data = task.load(data_root())
    little, factor = little_of(task, data)
    found = rehearse_ppo(config, little, workers=workers, devices=devices, cluster=cluster)
    at_once = len(found.devices)
    if set(found.devices) == {"cpu"}:
        cores = len(os.sched_getaffinity(0)) if cluster is None else cluster.cpus
        at_once = min(at_once, cores)
    with one_thread():
        share = max(1, config.envs // len(found.devices))
        steps, device = episode_steps(config), found.devices[0]
        rules = TrialRules(steps, population=found.population, keep_best=False)
        # A policy that has learnt nothing yet does anything.
        anyone = find_controller("random")
        pace = seconds_per_mac(task.recipe(data), share, rules, anyone, device)
    hosts = factor * pace * sum(outcome.train_macs for outcome in found.outcomes) / at_once
    rest = found.timings["seconds"] - found.timings["seconds.hosts"]
    would += f" on {task.name} ({found.population}, {len(found.devices)} workers), "
    would += f"{steps} decisions each"
    measured = ON_A_LITTLE if cluster is None else f"{MEASURED}; memory of nodes is not known"
    how = f"a round was played {measured}; hosts are {hosts / (hosts + rest):.0%} of a round"
    memory = peak_bytes(len(found.devices) if len(found.devices) > 1 else 0)
    known = memory if cluster is None else None
    return Estimate(would, str(out), rounds * (hosts + rest), known, how)


def tune_estimate(
    plan: "Plan", base: "Base", out: Path, trials: int, workers: "Workers"
) -> Estimate:
    """The first trial, which is of the settings that the search starts from, is rehearsed; all
    others are taken for as long."""
    from esper.api import one_thread
    from esper.tamiyo import HeuristicConfig, HeuristicController
    from esper.tolaria import data_root, find_task
    from esper.tuning import make_subject
    from esper.tuning.subjects import Heuristic

    less = "; trials that are given up take less"
    if not isinstance(base, HeuristicConfig):
        one = ppo_estimate(base, out, 0, workers, None)
        seconds = None if one.seconds is None else trials * one.seconds
        return replace(
            one, would=f"{trials} times {one.would}", seconds=seconds, how=one.how + less
        )
    subject = make_subject(plan, base, out)
    assert isinstance(subject, Heuristic)
    task, who = find_task(plan.task), HeuristicController(base)
    data, hosts = task.load(data_root()), len(subject.keys)
    with one_thread():
        _, macs = rehearsed(task, data, who, subject.rules, subject.keys[0])
        pace = seconds_per_mac(subject.recipe, hosts, subject.rules, who)
    would = f"try {trials} settings of the heuristic on {hosts} hosts of {task.name} "
    would += f"({subject.rules.population}), {subject.rules.steps} decisions each"
    how = f"one host was grown {ON_A_LITTLE}{less}"
    return Estimate(would, str(out), trials * hosts * macs * pace, peak_bytes(), how)
