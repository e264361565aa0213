"""`attach`: growth inside a training loop of the user's own.

with esper.attach(model, slots=["layer1"], example=x, evaluate=accuracy, steps=30) as body:
    body.manage(optimizer)
    for epoch in range(30):
        train(model, optimizer)
        body.step(accuracy())
plain = body.export()
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
from torch import nn
from torch.optim import Optimizer
from torch.optim.swa_utils import AveragedModel
from torch.utils.hooks import RemovableHandle

from esper.api.attached_host import AttachedHost
from esper.api.checks import check_optimizer, checked
from esper.api.controllers import check_script, find_controller
from esper.api.following import Follower
from esper.api.growing import grow_settings
from esper.api.loop_state import load_loop_state, loop_state
from esper.api.slots import Slots, as_slots
from esper.api.watch import Watch, warn_of_other_ground, warn_of_slow_seeds
from esper.growth.grown_module import GrownModule
from esper.growth.hooks import GROWING, clear_flag, set_flag
from esper.growth.optimizer import add_slot_groups, with_inner
from esper.growth.sites import SlotChoice
from esper.leyline import (
    IS_ACTIVE,
    ConfigError,
    EpisodeOutcome,
    ForgottenCallError,
    History,
)
from esper.leyline.events import event_from_row
from esper.leyline.growth_settings import Budget, GrowthSettings
from esper.tamiyo.situation import Controller
from esper.tolaria.engine.cycle import GrowthCycle
from esper.tolaria.engine.gradients import GradientMeter
from esper.tolaria.engine.population import TrainReadings
from esper.tolaria.engine.run import act, settle


class Body:
    """A model that grows inside a loop of the user's own.

    Call `manage(optimizer)` once, then `step(validation_score)` after every epoch, then `finish`,
    which the end of a `with` block does too. Esper listens to the optimiser and to gradients until
    then, or until `close`; afterwards the model and what grew in it are the user's to train on.
    """

    def __init__(
        self,
        host: AttachedHost,
        env: GrowthCycle,
        controller: Controller,
        history: History,
        watch: Watch,
    ) -> None:
        self.host, self.env, self.controller = host, env, controller
        self.recorder, self.watch = history, watch
        self.outcome: EpisodeOutcome | None = None
        self.optimizer_steps = 0
        self.meter = GradientMeter(host.network)
        self.followers: list[Follower] = []
        self._on_optimizer: list[RemovableHandle] = []
        self._on_gradients: list[RemovableHandle] = []
        set_flag(host.network.host, GROWING)
        controller.reset(1)

    def __enter__(self) -> "Body":
        return self

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        """Finish, unless an exception is on its way: then the model stays as it is."""
        try:
            if kind is None:
                self.finish()
        finally:
            self.close()

    @property
    def model(self) -> GrownModule:
        """The live network; calling it or the model itself is the same."""
        return self.host.network

    @property
    def begun(self) -> bool:
        """Has there been a first score? Before it there is nothing to save or to finish."""
        return self.env.situation is not None

    @property
    def history(self) -> list[dict[str, Any]]:
        return self.recorder.rows

    @checked()
    def manage(
        self,
        optimizer: Optimizer,
        *schedulers: Any,
        seed_lr: float | None = None,
        seed_weight_decay: float | None = None,
    ) -> None:
        """Let `optimizer` follow the growth: one parameter group per slot, empty at first.

        Schedulers that exist already must be given too; those made later need not. Seeds are
        trained with the settings of the first group, but for `seed_lr` (to which schedulers apply
        as they do to the others) and `seed_weight_decay`.
        """
        if self.host.optimizer is not None:
            raise ConfigError("an optimiser is managed already; one body has one optimiser")
        check_optimizer(optimizer, self.model.host_parameters())
        if seed_lr is None:
            warn_of_slow_seeds(optimizer)
        slot_ids = self.model.slot_config.slot_ids
        add_slot_groups(optimizer, slot_ids, schedulers, lr=seed_lr, weight_decay=seed_weight_decay)
        self.host.optimizer = optimizer
        # Where one optimiser works through another, as SAM does, the inner one takes the steps.
        stepping = [each for each in with_inner(optimizer) if len(with_inner(each)) == 1]
        self._on_optimizer = [e.register_step_pre_hook(self._watch_optimizer) for e in stepping]
        self.env.start()

    def follow(self, averaged: AveragedModel) -> GrownModule:
        """Let an average of the model's weights (EMA, SWA) grow with it; go on calling
        `averaged.update_parameters(model)` as before.

        Gives the averaged network with its slots, which `esper.export` takes. Raises ConfigError
        for an average of another model.
        """
        follower = Follower(self.model, averaged)
        self.followers.append(follower)
        return follower.network

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        """For evaluations between steps, as many as you like: evaluation mode, no gradients, and
        every module's own mode afterwards. What a gated blend does is measured on the way, so that
        `step` needs no evaluation of the whole network of its own."""
        with self.host.evaluating():
            yield

    @checked()
    def step(self, validation_score: float, validation_loss: float | None = None) -> bool:
        """Report an epoch; the controller then decides and the model may change.

        Gives False once all steps are done: the model trains on but changes no more, and epochs
        that are still reported are compared for the best. A loss that is not finite, or a score,
        makes the governor restore the last healthy epoch. Raises ForgottenCallError if the epoch
        cannot have trained the network.
        """
        if self.outcome is not None:
            return False
        self._check_calls()
        # Without a loss the governor can still see that a score is not a number.
        loss = validation_loss if validation_loss is not None else validation_score * 0.0
        try:
            going_on = self._take_in(float(loss), float(validation_score))
        except BaseException:
            self.close()
            raise
        self._watch_gradients()
        self.optimizer_steps = 0
        return going_on

    def _take_in(self, loss: float, score: float) -> bool:
        readings = self._readings()
        if not self.env.running[0]:
            self.env.finish_after(readings, np.array([loss]), np.array([score]))
            return False
        self.host.reported = (loss, score)
        transition = self.env.finish(readings)
        going_on = bool(transition.after.running[0])
        if going_on:
            self.env.begin(act(self.env, self.controller))
        for follower in self.followers:
            follower.start_over() if transition.rolled_back[0] else follower.sync()
        return going_on

    def finish(self) -> EpisodeOutcome:
        """Bring the model back to its best epoch, drop seeds that do not help, sum up.

        `outcome.best_step` says which epoch that was; the first is 0.
        """
        if self.outcome is None:
            self._check_stepped()
            try:
                (self.outcome,) = settle(
                    self.env,
                    np.ones(1, dtype=bool),
                    task=type(self.model.host).__name__,
                    controller=self.controller.name,
                )
            finally:
                self.close()
            for follower in self.followers:
                follower.sync()
        return self.outcome

    def close(self) -> None:
        """Stop listening: no hook of Esper's stays but those through which seeds act."""
        for handle in (*self._on_optimizer, *self._on_gradients):
            handle.remove()
        self._on_optimizer, self._on_gradients = [], []
        clear_flag(self.host.network.host, GROWING)

    def export(self) -> nn.Module:
        """A plain module for use without Esper, checked to give the live network's output.

        The body can go on growing.
        """
        self._check_stepped()
        return self.host.export(0)

    def state_dict(self) -> dict[str, Any]:
        """All that the next epoch depends on, for a checkpoint of the user's own: model and seeds,
        the optimiser's state and settings, the controller's memory, history. Tensors and plain
        values, so `torch.load(..., weights_only=True)` reads it. Call it after a `step`."""
        self._check_stepped()
        return {
            **loop_state(self.env, self.controller, self.host.managed()),
            "history": list(self.recorder.rows),
            "events": [event.row() for event in self.recorder.events],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a `state_dict`: attach and manage as before, then call this.

        Raises ConfigError, and changes nothing, if it is of another model, slots or optimiser.
        """
        optimizer = self.host.managed()
        if len(optimizer.param_groups) != len(state["groups"]):
            raise ConfigError(
                f"the state is of an optimiser with {len(state['groups'])} parameter groups, "
                f"this one has {len(optimizer.param_groups)}"
            )
        load_loop_state(self.env, self.controller, optimizer, state)
        self.recorder.rows[:] = state["history"]
        self.recorder.events[:] = map(event_from_row, state["events"])
        self.watch.catch_up()
        self._watch_gradients()
        self.optimizer_steps = 0

    def _readings(self) -> TrainReadings:
        return TrainReadings(
            loss=np.array([np.nan]),
            score=np.array([np.nan]),
            finite=np.array([True]),
            batches=self.optimizer_steps,
            samples=0,
            seeds={name: column[None] for name, column in self.meter.result().items()},
            rho=np.array([np.nan]),
        )

    def _watch_gradients(self) -> None:
        """Seeds come and go at every step, and their gradients with them."""
        for handle in self._on_gradients:
            handle.remove()
        self.meter = GradientMeter(self.model)
        self._on_gradients = self.meter.watch()

    def _watch_optimizer(
        self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        """Gradients are there when a step begins, unless it gets a closure that makes them."""
        self.optimizer_steps += 1
        _, *given = args
        closure = kwargs.get("closure", given[0] if given else None)
        if closure is None:
            self.meter.observe()
            return None

        def observed() -> Any:
            loss = closure()
            self.meter.observe()
            return loss

        if given:
            return (optimizer, observed, *given[1:]), kwargs
        return args, {**kwargs, "closure": observed}

    def _check_stepped(self) -> None:
        if not self.begun:
            raise ForgottenCallError("nothing grew: body.step(score) was never called")

    def _check_calls(self) -> None:
        self.host.managed()
        if self.optimizer_steps == 0:
            raise ForgottenCallError(
                "the managed optimiser has not stepped since the last body.step(); "
                "is another optimiser in use?"
            )
        norms = self.meter.result()["gradient_norm"]
        for index, slot in self.model.each_slot():
            if IS_ACTIVE[slot.stage] and norms[index] == 0.0:
                raise ForgottenCallError(
                    f"the seed at {slot.site.module} got no gradient in this epoch; "
                    "was the loss computed from another copy of the model?"
                )


@checked()
def attach(
    model: nn.Module,
    *,
    slots: SlotChoice | Slots,
    evaluate: Callable[[], float],
    example: Any = None,
    steps: int | None = None,
    controller: str | Controller = "heuristic",
    budget: Budget | None = None,
    settings: GrowthSettings | None = None,
    key: int = 0,
) -> Body:
    """Make `model` able to grow in a loop of the user's own, for `steps` epochs.

    `example` is one input of the model. `evaluate()` gives the validation score of the model as it
    is (higher is better, on any scale); it is called with one seed after another taken out, to
    measure what each contributes. The other arguments are those of `grow`; of `settings` those
    count that are about growth, not about training. Raises ConfigError for arguments that cannot
    work.
    """
    spec = as_slots(slots)
    example = spec.example if example is None else example
    if example is None:
        raise ConfigError("attach needs one input of the model: example=...")
    own = grow_settings(settings, steps, budget, None, scheduled=True)
    network = GrownModule.wrap(
        model, spec.modules, example, spec.blueprints, layout=spec.layout, causal=spec.causal
    )
    chosen = find_controller(controller, len(network.sites), network.catalogue)
    check_script(chosen, network)
    host = AttachedHost(network, evaluate, example, key)
    history = History()
    env = GrowthCycle(host, own, recorder=history)
    watch = Watch(history, env, chosen)
    history.listeners = [watch]
    warn_of_other_ground(chosen, type(model).__name__)
    return Body(host, env, chosen, history, watch)
