"""`grow`: train a model of the user's own and grow it where that helps."""

import logging
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import nn
from torch.optim import AdamW, Optimizer

from esper.api.callbacks import Callback, Caller
from esper.api.checks import FLAG, check_optimizer, checked
from esper.api.controllers import check_script, find_controller
from esper.api.epochs import decisions
from esper.api.grown import Grown, save_network
from esper.api.growth_run import GrowthRun, StopRule, open_record
from esper.api.insurance import insure
from esper.api.objective_checks import check_objectives
from esper.api.watch import Watch, warn_of_other_ground, warn_of_slow_seeds
from esper.growth.blueprints.catalogue import BlueprintCatalogue, default_catalogue
from esper.growth.sites import Layouts, SlotChoice
from esper.leyline import ConfigError, EsperError, History, Recorder
from esper.observatory.picture import draw_growth
from esper.observatory.run_directory import ARMS, GROWN, write_summary
from esper.observatory.terminal import epoch_progress
from esper.tamiyo.controllers.static import StaticController
from esper.tamiyo.situation import Controller
from esper.tolaria.engine.batches import LoaderSource
from esper.tolaria.engine.garden import Budget
from esper.tolaria.engine.objectives import LOSSES, SCORES, Objective, WholeSetScore, find_objective
from esper.tolaria.engine.population import LoopedPopulation
from esper.tolaria.engine.recipe import HostRecipe, Precision
from esper.tolaria.engine.run import RESCUE, TrialRules, make_env, settle

log = logging.getLogger("esper")

DEFAULT_LEARNING_RATE = 1e-3
OptimizerMaker = Callable[[Iterable[nn.Parameter]], Optimizer]


@checked(progress=FLAG)
def grow(
    model: nn.Module,
    train_loader: Iterable[Any],
    val_loader: Iterable[Any],
    *,
    slots: SlotChoice,
    example: Any = None,
    layout: Layouts | None = None,
    causal: bool | None = None,
    loss: str | Objective = "cross_entropy",
    score: str | Callable[[Any, Any], Any] = "accuracy",
    controller: str | Controller = "heuristic",
    start: Literal["fresh", "trained"] = "fresh",
    steps: int = 30,
    budget: Budget | None = None,
    optimizer: Optimizer | OptimizerMaker | None = None,
    scheduler: Callable[[Optimizer], Any] | None = None,
    key: int = 0,
    out: str | Path | None = None,
    resume: bool = False,
    insured: bool = False,
    patience: int | None = None,
    max_time: float | None = None,
    batches_per_epoch: int | None = None,
    forward: Callable[[nn.Module, Any], Any] | None = None,
    callbacks: Sequence[Callback] = (),
    progress: bool = True,
    blueprints: BlueprintCatalogue | None = None,
    incubation: Literal["isolated", "joint"] | None = None,
    max_seeds: int | None = None,
    max_grad_norm: float | None = None,
    precision: Precision = "fp32",
) -> Grown:
    """Train `model` in place for `steps` epochs and grow it where that helps.

    Loaders yield (input, target), or a dict that is both; an input that is a dict or a tuple is
    given to the model as keywords or positions. `forward(model, input)`, if given, calls the model
    instead, and a batch may then be anything. `slots` are module names, a regular expression or a
    predicate `(name, module)`; `list_slots(model, example)` shows what there is, where `example` is
    one input (by default the first of `train_loader`). `layout` says of slots by name which
    dimension is what ({"encoder": "BTC"}), where the table shows "?"; `causal=True` that seeds must
    not look ahead along positions (None: as the model says, by an attribute `causal` or calls with
    `is_causal`; else they may).

    `loss` is a name or a callable of (output, target) that averages over the batch. `score` is a
    name, a callable of (all outputs, all targets) of validation, or a metric of torchmetrics; it is
    better when higher, on any scale. `optimizer` is an optimiser of the model's parameters or a
    function that makes one (default: AdamW, 1e-3); `scheduler` makes a scheduler of it, which is
    stepped after every epoch. With `precision="bf16"` the model computes in bfloat16 while it is
    trained and evaluated.

    `start="trained"` is for a model that arrives trained: the first decision comes before the first
    epoch, seeds act from birth, a network that has memorised its data is cooled so that seeds can
    learn, and the learning rate, unless there is a `scheduler`, rises and falls over the run.

    The run ends after `steps` epochs, `patience` epochs without a better score or `max_time`
    seconds, whichever is first. `out` is a folder for its record, with a picture and the network;
    with `resume` the same call goes on where it was stopped or killed. `insured` also trains the
    model without growth and keeps whichever is better on validation. `callbacks` are told of every
    epoch and event; `progress` is shown on the terminal.

    Ctrl-C ends the run early with what it has reached. Raises ConfigError, before anything is
    trained, for arguments that cannot work.
    """
    data = LoaderSource(train_loader, val_loader, example, forward, batches_per_epoch)
    recipe = HostRecipe(
        build=lambda: model,
        slots=slots,
        data=data,
        loss=find_objective("loss", loss, LOSSES),
        score=scoring(score),
        optimizer=optimizer_maker(optimizer),
        catalogue=blueprints or default_catalogue(),
        max_grad_norm=max_grad_norm,
        precision=precision,
        layout=layout,
        causal=causal,
    )
    rules = replace(
        _rules(start, steps, scheduled=scheduler is not None), budget=budget, max_seeds=max_seeds
    )
    if incubation is not None:
        rules = replace(rules, incubation=incubation)
    if resume and out is None:
        raise ConfigError("resume=True needs the folder of the run: out=DIR")
    check_objectives(model, recipe, device_of(model))
    plan = Plan(
        model=model,
        recipe=recipe,
        rules=rules,
        key=key,
        loaders=(train_loader, val_loader),
        scheduler=scheduler,
        patience=patience,
        max_time=max_time,
        batches_per_epoch=batches_per_epoch,
        resume=resume,
        progress=progress,
    )
    caller, folder = Caller(callbacks), None if out is None else Path(out)
    beside = None if folder is None else folder / ARMS / "host-alone"

    def grown_run() -> Grown:
        return _run(plan, controller, "grown", folder, caller)

    def twin_run(twin: nn.Module, own: Any) -> Grown:
        return _run(plan.of(twin, own), StaticController(), "twin", beside)

    if insured:
        grown = insure(grown_run, twin_run, (model, optimizer), plan.loaders)
    else:
        grown = grown_run()
    if folder is not None:
        others = {"host alone": beside} if beside and grown.outcome.twin else {}
        _write_results(folder, grown, others)
    caller.end(grown.outcome)
    return grown


@dataclass(frozen=True)
class Plan:
    """A run, with everything checked, before its folder is opened."""

    model: nn.Module
    recipe: HostRecipe
    rules: TrialRules
    key: int
    loaders: tuple[Iterable[Any], Iterable[Any]]
    scheduler: Callable[[Optimizer], Any] | None
    patience: int | None
    max_time: float | None
    batches_per_epoch: int | None
    resume: bool
    progress: bool

    @property
    def epochs(self) -> int:
        return self.rules.steps + (self.rules.start == "fresh")

    def of(self, model: nn.Module, optimizer: Any) -> "Plan":
        """The same for another model."""
        recipe = replace(self.recipe, build=lambda: model, optimizer=optimizer_maker(optimizer))
        return replace(self, model=model, recipe=recipe)

    def settings(self, controller: Controller, slots: Sequence[str]) -> dict[str, Any]:
        """What decides how the run goes, for its record; a run that goes on must have the same."""
        budget = self.rules.budget or Budget()
        return {
            "model": type(self.model).__name__,
            "controller": controller.name,
            "start": self.rules.start,
            "steps": self.epochs,
            "key": self.key,
            "slots": ", ".join(slots),
            "loss": _name(self.recipe.loss),
            "score": _name(self.recipe.score),
            "incubation": self.rules.incubation,
            "max_params": budget.params,
            "max_macs": budget.macs,
            "max_seeds": self.rules.max_seeds,
            "max_grad_norm": self.recipe.max_grad_norm,
            "precision": self.recipe.precision,
            "layout": None if self.recipe.layout is None else str(self.recipe.layout),
            "causal": self.recipe.causal,
            "patience": self.patience,
            "batches_per_epoch": self.batches_per_epoch,
            "scheduled": self.scheduler is not None,
        }


def _run(
    plan: Plan,
    controller: str | Controller,
    label: str,
    folder: Path | None,
    *listeners: Recorder,
) -> Grown:
    """Make, train and settle; the folder comes last: a run that cannot begin leaves nothing."""
    history = History()
    env = make_env(plan.recipe, [plan.key], plan.rules, history, device_of(plan.model))
    network, population = env.population.template, env.population
    assert isinstance(population, LoopedPopulation)
    (optimizer,) = population.optimizers
    chosen = find_controller(controller, len(network.sites), plan.recipe.catalogue)
    check_script(chosen, network)
    warn_of_other_ground(chosen, type(plan.model).__name__)
    run = GrowthRun(
        env=env,
        controller=chosen,
        history=history,
        optimizer=optimizer,
        scheduler=None if plan.scheduler is None else _make_scheduler(plan.scheduler, optimizer),
        loaders=plan.loaders,
        stop=StopRule(plan.patience, plan.max_time),
        settings=plan.settings(chosen, network.slot_config.names),
    )
    with ExitStack() as stack:
        told: list[Recorder] = []
        record = None
        if folder is not None:
            record = stack.enter_context(open_record(folder, run, resume=plan.resume))
            told.append(record)
        if plan.progress:
            told.append(stack.enter_context(epoch_progress(label, plan.epochs)))
        watch = Watch(history, env, chosen, plan.recipe.data)
        watch.catch_up()
        history.listeners = [*told, *listeners, watch]
        (outcome,) = settle(
            env,
            np.ones(1, dtype=bool),
            task=type(plan.model).__name__,
            controller=chosen.name,
            ended=run.play(record),
        )
    return Grown(network, history.rows, history.events, outcome, plan.recipe.data.example())


def _rules(start: Literal["fresh", "trained"], steps: int, *, scheduled: bool) -> TrialRules:
    if start == "fresh":
        return TrialRules(decisions(steps))
    return replace(RESCUE, steps=steps, schedule=None if scheduled else RESCUE.schedule)


def _make_scheduler(make: Callable[[Optimizer], Any], optimizer: Optimizer) -> Any:
    scheduler = make(optimizer)
    if not all(hasattr(scheduler, name) for name in ("step", "state_dict", "load_state_dict")):
        raise ConfigError(
            "scheduler must be a function that makes a scheduler of an optimiser, such as lambda "
            f"optimizer: CosineAnnealingLR(optimizer, 30); it gave {type(scheduler).__name__}"
        )
    return scheduler


def optimizer_maker(optimizer: Optimizer | OptimizerMaker | None) -> OptimizerMaker:
    if optimizer is None:
        return lambda params: AdamW(params, lr=DEFAULT_LEARNING_RATE)

    def make(params: Iterable[nn.Parameter]) -> Optimizer:
        params = list(params)
        made = optimizer if isinstance(optimizer, Optimizer) else optimizer(params)
        check_optimizer(made, params)
        warn_of_slow_seeds(made)
        return made

    return make


def scoring(score: str | Callable[[Any, Any], Any]) -> Objective:
    """A score by name is a mean over batches; one of the user's own sees everything at once."""
    found = find_objective("score", score, SCORES)
    # By identity: metrics have an idea of equality of their own.
    known = any(found is each for each in SCORES.values())
    return found if known else WholeSetScore(found)


def _name(objective: Any) -> str:
    objective = objective.score if isinstance(objective, WholeSetScore) else objective
    return getattr(objective, "__name__", type(objective).__name__)


def device_of(model: nn.Module) -> torch.device:
    return next((p.device for p in model.parameters()), torch.device("cpu"))


def _write_results(folder: Path, grown: Grown, others: dict[str, Path]) -> None:
    """The network, a summary and a picture, beside the record."""
    o = grown.outcome
    save_network(grown.model, folder / GROWN)
    row = o.summary("grown")
    if o.twin is not None:
        row["twin"] = vars(o.twin)
    write_summary(folder, [row])
    try:
        draw_growth(folder, f"{o.task}, {o.controller}, key {o.key}", others)
    except EsperError as error:
        log.warning("no picture in %s: %s", folder, error)
