"""`grow`: train a model and grow it where that helps."""

import copy
import logging
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

from torch import nn
from torch.optim import AdamW, Optimizer

from esper.api.callbacks import Callback, Caller, check_script, find_controller
from esper.api.checks import check_model, check_objectives, check_optimizer, checked
from esper.api.distributed import check_parallel, in_processes
from esper.api.grown import Grown, save_network
from esper.api.growth_run import (
    GrowthRun,
    MakeScheduler,
    open_folder,
    randomness,
    restore_randomness,
)
from esper.api.growth_warnings import warn_if_out_of_domain, warn_of_slow_seeds
from esper.api.slots import Slots, as_slots
from esper.growth.blueprints.catalogue import default_catalogue
from esper.growth.devices import devices_of, find_device, input_device
from esper.growth.grown_module import GrownModule
from esper.growth.hooks import original
from esper.growth.optimizer import with_inner
from esper.growth.sites import MISFITS, SlotChoice, explaining
from esper.growth.snapshot import restore_snapshot, take_snapshot
from esper.leyline import ConfigError, EsperError, Recorder, TwinReport
from esper.leyline.depth import Depth
from esper.leyline.growth_settings import Budget, GrowthSettings, RateSchedule
from esper.observatory.picture import draw_growth
from esper.observatory.run_directory import ARMS, GROWN, RunDirectory, write_summary
from esper.observatory.terminal import epoch_progress
from esper.tamiyo.controllers.simple import StaticController
from esper.tamiyo.situation import Controller
from esper.tolaria.engine.batches import LoaderSource
from esper.tolaria.engine.objectives import (
    LOSSES,
    SCORES,
    Objective,
    WholeSetScore,
    find_objective,
    named,
)
from esper.tolaria.engine.recipe import HostRecipe
from esper.tolaria.engine.run import GrowthEnv, play_run

log = logging.getLogger("esper")

DEFAULT_LEARNING_RATE = 1e-3
DEFAULT_EPOCHS = 30
# A twin that costs less than this share of the run is trained by default.
CHEAP = 0.1
OptimizerMaker = Callable[[Iterable[nn.Parameter]], Optimizer]


@checked()
def grow(
    model: nn.Module,
    train_loader: Iterable[Any],
    val_loader: Iterable[Any],
    *,
    slots: SlotChoice | Slots = "auto",
    depth: Depth | str | None = None,
    loss: str | Objective = "cross_entropy",
    score: str | Callable[[Any, Any], Any] = "accuracy",
    optimizer: Any = None,
    controller: str | Controller = "heuristic",
    steps: int | None = None,
    budget: Budget | None = None,
    start: Literal["fresh", "trained"] | None = None,
    settings: GrowthSettings | None = None,
    key: int = 0,
    out: str | Path | None = None,
    resume: bool = False,
    callbacks: Sequence[Callback] = (),
) -> Grown:
    """Train `model` in place for `steps` epochs and grow it where that helps.

    Loaders yield (input, target), or a dict that is both. A dict or tuple as input is passed to the
    model as keywords or positional arguments. `slots` are module names, a regular expression or a
    predicate `(name, module)`; `list_slots(model, example)` lists the possible modules, of which
    "auto" takes a few. `esper.Slots` holds more: an example input, layouts, a function that calls
    the model, blueprints. With `depth` the model grows by blocks of its own instead: an
    `esper.Depth`, or the name of its list of blocks, or "auto".

    `loss` is a name or a callable of (output, target) that averages over the batch. `score` is a
    name, a callable of (all outputs, all targets) of validation, or a torchmetrics metric; higher
    is better, on any scale. `optimizer` is an optimizer of the model's parameters or a function
    that makes one (default: AdamW, 1e-3). With a scheduler it is a pair `(optimizer,
    make_scheduler)`; `make_scheduler(optimizer)` makes a scheduler that is stepped every epoch.

    `controller` decides what grows: a name, the folder of a trained policy, or an object with
    `name`, `reset` and `act`. `steps` is the number of epochs (default 30). `budget` caps the size
    of the grown model. `start="trained"` is for a model that has been trained already: the first
    decision comes before the first epoch, seeds act from the beginning, the output is cooled if the
    model has memorised its data, and without a scheduler the learning rate warms up and decays.
    `settings` are all other settings; the arguments above override them.

    `out` is a folder for the record, a picture and the network; with `resume` the same call
    continues a run that was stopped or killed. `callbacks` are called after every epoch and event.

    Ctrl-C ends the run early; the best network so far is returned. Raises ConfigError, before
    anything is trained, for arguments that cannot work.
    """
    check_parallel(model)
    if in_processes():
        raise ConfigError(
            "esper.grow trains in one process and would train a different network in each; "
            "use esper.attach with a DistributedDataParallel model and your own loop"
        )
    check_model(original(model))
    spec = as_slots(slots, depth)
    optimizer, make_scheduler = optimizer if isinstance(optimizer, tuple) else (optimizer, None)
    settings = grow_settings(settings, steps, budget, start, scheduled=make_scheduler is not None)
    if settings.trained and isinstance(spec.modules, Depth) and spec.modules.add is None:
        raise ConfigError(
            f"start='trained' and {spec.modules} contradict each other: that would leave out "
            "blocks that have been trained; give esper.Depth(path, add=...) to deepen the model"
        )
    data = LoaderSource(
        train_loader, val_loader, spec.example, spec.forward, settings.batches_per_epoch
    )
    recipe = HostRecipe(
        build=lambda: model,
        slots=spec.modules,
        data=data,
        loss=find_objective("loss", loss, LOSSES),
        score=scoring(score),
        optimizer=optimizer_maker(optimizer),
        catalogue=default_catalogue() if spec.blueprints is None else spec.blueprints,
        layout=spec.layout,
        causal=spec.causal,
    )
    if resume and out is None:
        raise ConfigError("resume=True needs the folder of the run: out=DIR")
    move(model, optimizer, settings.device)
    recipe = check_objectives(original(model), recipe, input_device(model))
    run = ModelRun(model, recipe, settings, key, (train_loader, val_loader), make_scheduler, resume)
    caller, folder = Caller(callbacks), None if out is None else Path(out)
    host_alone = None if folder is None else folder / ARMS / "host-alone"

    def twin_run(twin: nn.Module, own: Any) -> Grown:
        return run.of(twin, own).play(StaticController(), "twin", host_alone)

    grown_run = partial(run.play, controller, "grown", folder, caller)
    if settings.insured is False:
        grown = grown_run()
    else:
        grown = insure(grown_run, twin_run, (model, optimizer), run.loaders, settings.insured)
    if folder is not None:
        others = {"host alone": host_alone} if host_alone and grown.outcome.twin else {}
        _write_results(folder, grown, others)
    caller.end(grown.outcome)
    return grown


def grow_settings(
    settings: GrowthSettings | None,
    steps: int | None,
    budget: Budget | None,
    start: Literal["fresh", "trained"] | None,
    *,
    scheduled: bool,
) -> GrowthSettings:
    """The settings with the other arguments applied. `steps` counts epochs, `settings.steps`
    decisions. With a scheduler of the user no schedule of Esper is applied (`scheduled`)."""
    own = settings or GrowthSettings()
    own = replace(
        own,
        budget=budget or own.budget,
        start=start or own.start,
        schedule=RateSchedule() if scheduled else own.schedule,
    )
    if steps is not None or own.steps is None:
        epochs = steps or DEFAULT_EPOCHS
        own = replace(own, steps=epochs if own.trained else decisions(epochs))
    return own


@dataclass(frozen=True)
class ModelRun:
    """A run with a user's model; its arguments have been checked."""

    model: nn.Module
    recipe: HostRecipe
    settings: GrowthSettings
    key: int
    loaders: tuple[Iterable[Any], Iterable[Any]]
    make_scheduler: MakeScheduler | None
    resume: bool

    def of(self, model: nn.Module, optimizer: Any) -> "ModelRun":
        """The same run with another model."""
        recipe = replace(self.recipe, build=lambda: model, optimizer=optimizer_maker(optimizer))
        return replace(self, model=model, recipe=recipe)

    def config(self) -> dict[str, Any]:
        """For the record; a resumed run must have the same."""
        recipe = self.recipe
        return {
            "model": self.name,
            "key": self.key,
            "loss": _name(recipe.loss),
            "score": _name(recipe.score),
            "layout": None if recipe.layout is None else str(recipe.layout),
            "causal": recipe.causal,
            "depth": str(recipe.slots) if isinstance(recipe.slots, Depth) else None,
            "scheduled": self.make_scheduler is not None,
            **self.settings.flat(),
            "steps": self.epochs,
        }

    @property
    def epochs(self) -> int:
        return (self.settings.steps or 0) + (not self.settings.trained)

    @property
    def name(self) -> str:
        return type(original(self.model)).__name__

    def play(
        self, controller: str | Controller, label: str, folder: Path | None, *listeners: Recorder
    ) -> Grown:
        def choose(network: GrownModule) -> Controller:
            recipe = self.recipe
            chosen = find_controller(controller, len(network.sites), recipe.catalogue, recipe.slots)
            check_script(chosen, network)
            warn_if_out_of_domain(chosen, self.name)
            run.config["slots"] = ", ".join(network.slot_config.names)
            return chosen

        def open_record(run: GrowthRun) -> RunDirectory:
            assert folder is not None
            return stack.enter_context(open_folder(folder, run, resume=self.resume))

        settings = self.settings
        with ExitStack() as stack:
            if settings.progress:
                bar = epoch_progress(label, self.epochs)
                listeners = (stack.enter_context(bar), *listeners)
            run = GrowthRun(
                settings,
                self.config(),
                self.recipe.data,
                make_scheduler=self.make_scheduler,
                loaders=self.loaders,
                open_record=None if folder is None else open_record,
                listeners=listeners,
            )
            (done,) = play_run(
                self.recipe,
                [self.key],
                settings,
                choose,
                run.history,
                task=self.name,
                device=input_device(self.model),
                session=run,
            )
        example = self.recipe.data.example()
        return Grown(
            done.network,
            run.history.rows,
            run.history.events,
            done.outcome,
            example,
            _twin_cost(run.env),
        )


def _twin_cost(env: GrowthEnv) -> float | None:
    whole, host = int(env.garden.train_macs[0]), int(env.garden.host_train_macs[0])
    return host / whole if whole else None


def optimizer_maker(optimizer: Optimizer | OptimizerMaker | None) -> OptimizerMaker:
    if optimizer is None:
        return lambda params: AdamW(params, lr=DEFAULT_LEARNING_RATE)

    def make(params: Iterable[nn.Parameter]) -> Optimizer:
        params = list(params)
        with explaining("the optimizer cannot be made"):
            made = optimizer if isinstance(optimizer, Optimizer) else optimizer(params)
        check_optimizer(made, params)
        warn_of_slow_seeds(made)
        return made

    return make


def scoring(score: str | Callable[[Any, Any], Any]) -> Objective:
    """A score by name is a mean over batches; a user's callable gets the whole set at once."""
    found = find_objective("score", score, SCORES)
    # By identity: metrics may define their own equality.
    known = any(found is each for each in SCORES.values())
    return found if known else WholeSetScore(found)


def _name(objective: Any) -> str:
    objective = objective.score if isinstance(objective, WholeSetScore) else named(objective)
    return getattr(objective, "__name__", type(objective).__name__)


def move(model: nn.Module, optimizer: Any, name: str | None) -> None:
    """Move a model, and the state of its optimizer, to the device of that name; None leaves them
    where they are."""
    if name is None:
        return
    device, found = find_device(name), devices_of(model)
    if len(found) > 1:
        raise ConfigError(
            f"the model is on {', '.join(map(str, found))}, so it has no single device; leave out "
            f"device={name!r} to keep it there"
        )
    before = list(model.parameters())
    model.to(device)
    # Devices that torch knows from plug-ins get new parameters, others only new data.
    moved: dict[Any, Any] = dict(zip(before, model.parameters(), strict=True))
    for each in with_inner(optimizer) if isinstance(optimizer, Optimizer) else ():
        for group in each.param_groups:
            group["params"] = [moved.get(param, param) for param in group["params"]]
        if each.state:
            state = {moved.get(param, param): values for param, values in each.state.items()}
            each.state.clear()
            each.state.update(state)
            each.load_state_dict(each.state_dict())  # to the devices of the parameters


def _write_results(folder: Path, grown: Grown, others: dict[str, Path]) -> None:
    """Write the network, a summary and a picture to the folder of the record."""
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


def decisions(epochs: int) -> int:
    """The number of decisions in a run: one between any two epochs. Raises ConfigError."""
    if epochs < 2:
        raise ConfigError(
            f"steps={epochs} leaves nothing to decide: give at least 2 epochs, one before and one "
            "after the first decision"
        )
    return epochs - 1


def insure(
    grow: Callable[[], Grown],
    train_twin: Callable[[nn.Module, Any], Grown],
    model_and_optimizer: tuple[nn.Module, Any],
    loaders: tuple[Any, ...],
    wanted: bool | None,
) -> Grown:
    """Insurance: grow the model, then train a copy of the original, the twin, without growth.

    Both get the same batches in the same order, and the same noise. The model ends as the one with
    the better validation score; if they are equal, as the grown one. An interrupted run has no
    twin. If it is not `wanted` but None, there is one where it costs less than CHEAP of the run.
    """
    devices = devices_of(model_and_optimizer[0])
    try:
        # Copied together, so that the copied optimizer holds the copied parameters.
        twin_model, twin_optimizer = copy.deepcopy(model_and_optimizer)
    except MISFITS as error:
        if wanted:
            name = type(model_and_optimizer[0]).__name__
            raise ConfigError(
                f"insured=True needs a copy of {name}, but it cannot be copied: {error}"
            ) from error
        return grow()
    beginning = randomness(loaders, devices)
    grown = grow()
    if not wanted and (grown.twin_cost is None or grown.twin_cost >= CHEAP):
        return grown
    if grown.outcome.ended == "interrupted":
        log.warning("the run was interrupted before the twin was trained: it is not insured")
        return grown
    end = randomness(loaders, devices)
    restore_randomness(loaders, beginning)
    twin = train_twin(twin_model, twin_optimizer)
    restore_randomness(loaders, end)
    ours, theirs = grown.outcome, twin.outcome
    kept = "twin" if _score(theirs.val_score) > _score(ours.val_score) else "grown"
    scores = theirs.val_score, ours.val_score
    gain = None if None in scores else _score(scores[1]) - _score(scores[0])
    outcome = replace(ours, twin=TwinReport(theirs.val_score, theirs.train_macs, kept, gain))
    if kept == "twin":
        log.warning("the model without growth is better on validation, so it is kept")
        restore_snapshot(grown.model, None, take_snapshot(twin.model, None))
        about = ("best_step", "val_score", "val_loss", "params", "macs", "seeds")
        outcome = replace(outcome, **{name: getattr(theirs, name) for name in about})
    return replace(grown, outcome=outcome)


def _score(score: float | None) -> float:
    return float("-inf") if score is None else score
