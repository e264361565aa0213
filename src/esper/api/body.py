"""`attach`: growth inside a user's own training loop.

with esper.attach(model, slots=["layer1"], example=x, evaluate=accuracy, steps=30) as body:
    body.manage(optimizer)
    for epoch in range(30):
        train(model, optimizer)
        body.step(accuracy())
plain = body.export()
"""

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from functools import partial
from itertools import chain
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.swa_utils import AveragedModel
from torch.utils.hooks import RemovableHandle

from esper.api.attached_host import AttachedHost, Follower
from esper.api.callbacks import check_script, find_controller
from esper.api.checks import check_model, check_optimizer, checked
from esper.api.distributed import Processes, SeedGradients, check_parallel, check_wrapper
from esper.api.growing import grow_settings
from esper.api.growth_run import load_loop_state, loop_state
from esper.api.growth_warnings import GrowthWarnings, warn_if_out_of_domain, warn_of_slow_seeds
from esper.api.slots import Slots, as_slots
from esper.growth.grown_module import GrownModule
from esper.growth.hooks import GROWING, clear_flag, set_flag
from esper.growth.optimizer import with_inner
from esper.growth.outputs import map_tensors
from esper.growth.sites import SlotChoice, inner
from esper.leyline import (
    IS_ACTIVE,
    ConfigError,
    EpisodeOutcome,
    ForgottenCallError,
    History,
)
from esper.leyline.depth import Depth
from esper.leyline.events import event_from_row
from esper.leyline.growth_settings import Budget, GrowthSettings
from esper.tamiyo.situation import Controller
from esper.tolaria.engine.cycle import GrowthCycle
from esper.tolaria.engine.gradients import GradientMeter
from esper.tolaria.engine.population import TrainReadings, add_seed_groups
from esper.tolaria.engine.run import act, settle


class Body:
    """A model that grows inside a user's own training loop.

    Call `manage(optimizer)` once, `step(validation_score)` after every epoch, and `finish` at the
    end, which a `with` block does too. Until then, or until `close`, Esper has hooks on the
    optimizer and on gradients. Afterwards the model can be trained further, with its seeds.
    """

    def __init__(
        self,
        host: AttachedHost,
        env: GrowthCycle,
        controller: Controller,
        history: History,
        warnings: GrowthWarnings,
    ) -> None:
        self.host, self.env, self.controller = host, env, controller
        self.recorder, self.warnings = history, warnings
        self.outcome: EpisodeOutcome | None = None
        self.optimizer_steps = 0
        self.meter = GradientMeter(host.network)
        self.processes = host.processes
        self.seed_gradients = SeedGradients(host.network, host.processes)
        self.followers: list[Follower] = []
        self._on_optimizer: list[RemovableHandle] = []
        self._on_gradients: list[RemovableHandle] = []
        set_flag(host.network.host, GROWING)
        controller.reset(1)

    def __enter__(self) -> "Body":
        return self

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        """Finish; after an exception only remove the hooks."""
        try:
            if kind is None:
                self.finish()
        finally:
            self.close()

    @property
    def model(self) -> GrownModule:
        """The live network; calling it is the same as calling the model itself."""
        return self.host.network

    @property
    def begun(self) -> bool:
        """Whether `step` has been called; before it there is nothing to save or to finish."""
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
        """Add a parameter group for each slot to `optimizer`; it gets the parameters of seeds.

        Give schedulers that exist already, too. Seeds are trained with the settings of the first
        group, except for `seed_lr` (schedulers apply to it as well) and `seed_weight_decay`.
        """
        if self.host.optimizers:
            raise ConfigError("an optimizer is managed already; call manage once")
        check_optimizer(optimizer, self.model.host_parameters())
        check_parallel(self.model.host, optimizer)
        if seed_lr is None:
            warn_of_slow_seeds(optimizer)
        add_seed_groups(
            self.model, optimizer, schedulers, lr=seed_lr, weight_decay=seed_weight_decay
        )
        self.host.optimizers = [optimizer]
        # If an optimizer wraps another one, as SAM does, the inner one takes the steps.
        stepping = [each for each in with_inner(optimizer) if len(with_inner(each)) == 1]
        self._on_optimizer = [e.register_step_pre_hook(self._watch_optimizer) for e in stepping]
        self.processes.share(self.model)
        self.env.start()
        self._follow_seeds()

    def follow(self, averaged: AveragedModel) -> GrownModule:
        """Let an average of the model's weights (EMA, SWA) grow with it; keep calling
        `averaged.update_parameters(model)`.

        Returns the averaged network with its slots, for `esper.export`. Raises ConfigError for an
        average of another model.
        """
        if self.model.stacks is not None:
            raise ConfigError(
                "an average of weights cannot follow growth in depth; make it when all blocks have "
                "come"
            )
        follower = Follower(self.model, averaged)
        self.followers.append(follower)
        return follower.network

    def evaluating(self) -> AbstractContextManager[None]:
        """For evaluations between steps: evaluation mode, no gradients, and the previous mode of
        every module afterwards. It also measures gated blends, which saves `step` an evaluation of
        the complete network."""
        return self.host.evaluating()

    @checked()
    def step(
        self,
        validation_score: float,
        validation_loss: float | None = None,
        *,
        samples: int | None = None,
    ) -> bool:
        """Report an epoch; the controller then decides and the model may change.

        With several processes, call it in each: scores and losses are averaged, weighted by the
        number of `samples` that each process evaluated, if given.

        Returns False once all steps are done: later epochs can still be the best one, but nothing
        grows any more. If the loss or the score is not finite, the governor restores the last
        healthy epoch. Raises ForgottenCallError if the epoch cannot have trained the network.
        """
        if self.outcome is not None:
            return False
        with self.processes.together():
            self._check_calls()
        self.processes.weight = 1.0 if samples is None else float(samples)
        # Without a loss, a score that is not finite still reaches the governor.
        loss = validation_loss if validation_loss is not None else validation_score * 0.0
        try:
            running = self._end_epoch(
                *self.processes.mean(np.array([float(loss), float(validation_score)])).tolist()
            )
        except BaseException:
            self.close()
            raise
        self._watch_gradients()
        self.optimizer_steps = 0
        return running

    def _end_epoch(self, loss: float, score: float) -> bool:
        self.processes.share(self.model, parameters=False)
        self._check_equal()
        readings = self._readings()
        if not self.env.running[0]:
            self.env.finish_after(readings, np.array([loss]), np.array([score]))
            return False
        self.host.reported = (loss, score)
        transition = self.env.finish(readings)
        running = bool(transition.after.running[0])
        if running:
            self.env.begin(self.processes.first(act(self.env, self.controller)))
        for follower in self.followers:
            follower.start_over() if transition.rolled_back[0] else follower.sync()
        return running

    def finish(self) -> EpisodeOutcome:
        """Restore the model of the best epoch, remove seeds that do not help, and return the
        outcome; `outcome.best_step` is that epoch, counted from 0."""
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
        """Remove the hooks on the optimizer and on gradients; those of the seeds stay."""
        for handle in (*self._on_optimizer, *self._on_gradients):
            handle.remove()
        self._on_optimizer, self._on_gradients = [], []
        clear_flag(self.host.network.host, GROWING)
        self.seed_gradients.watch()  # seeds that stay are trained further

    def export(self) -> nn.Module:
        """A plain module that needs no Esper; its output is checked against the live network's. The
        body can continue to grow."""
        self._check_stepped()
        return self.host.export(0)

    def state_dict(self) -> dict[str, Any]:
        """The state for a checkpoint: model and seeds, the optimizer's state and settings, the
        controller's memory, history. It holds tensors and plain values only, so that
        `torch.load(..., weights_only=True)` reads it. Call it after a `step`."""
        self._check_stepped()
        state = loop_state(self.env, self.controller, self.host.optimizer)
        return {
            # Copies: the next step writes over tensors of its snapshots.
            **map_tensors(torch.clone, state),
            "history": list(self.recorder.rows),
            "events": [event.row() for event in self.recorder.events],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a `state_dict`: attach and manage as before, then call this.

        Raises ConfigError, and changes nothing, if it is of another model, slots or optimizer.
        """
        optimizer = self.host.optimizer
        with self.processes.together():
            if not isinstance(state, dict) or not {"cycle", "groups", "history"} <= set(state):
                raise ConfigError("the state to load does not come from state_dict() of a body")
            if len(optimizer.param_groups) != len(state["groups"]):
                raise ConfigError(
                    f"the state is of an optimizer with {len(state['groups'])} parameter groups, "
                    f"this one has {len(optimizer.param_groups)}"
                )
            load_loop_state(self.env, self.controller, optimizer, state)
        self._check_equal()
        self.recorder.rows[:] = state["history"]
        self.recorder.events[:] = map(event_from_row, state["events"])
        self.warnings.catch_up()
        self._watch_gradients()
        self.optimizer_steps = 0

    def load_weights(self, weights: Mapping[str, Any]) -> None:
        """Before the first step: a state dict of the model with the blocks that it has now, to
        continue from."""
        self.model.host.load_state_dict(weights)
        self.recorder.events.pop()  # of the snapshot of other weights
        self.env.save_healthy()

    def _check_equal(self) -> None:
        """All processes must have the same network, with seeds in the same stages."""
        table = ((f"column {k}", torch.from_numpy(v)) for k, v in vars(self.env.table).items())
        self.processes.check_equal(chain(self.model.named_parameters(), table))

    def _readings(self) -> TrainReadings:
        return TrainReadings(
            loss=np.array([np.nan]),
            score=np.array([np.nan]),
            finite=np.array([True]),
            batches=self.optimizer_steps,
            samples=0,
            seeds=self.processes.first(
                {name: column[None] for name, column in self.meter.result().items()}
            ),
            rho=np.array([np.nan]),
        )

    def _watch_gradients(self) -> None:
        """Hooks for the seeds that the network has now."""
        for handle in self._on_gradients:
            handle.remove()
        self.meter = GradientMeter(self.model)
        self._on_gradients = self.meter.watch()
        self._follow_seeds()

    def _follow_seeds(self) -> None:
        """All processes start with the same seeds, and average their gradients."""
        for _, slot in self.model.each_slot():
            self.processes.share(slot)
        self.seed_gradients.watch(self.meter.store)

    def _watch_optimizer(
        self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        """Measure gradients when a step starts or, if it gets a closure, after the closure."""
        self.optimizer_steps += 1
        # A GradScaler sets these if the optimizer itself unscales gradients and skips overflows.
        scale, overflow = (getattr(optimizer, name, None) for name in ("grad_scale", "found_inf"))
        observe = partial(self.meter.observe, scale, scaled=overflow is not None)
        _, *given = args
        closure = kwargs.get("closure", given[0] if given else None)
        if closure is None:
            observe()
            return None

        def observed() -> Any:
            loss = closure()
            observe()
            return loss

        if given:
            return (optimizer, observed, *given[1:]), kwargs
        return args, {**kwargs, "closure": observed}

    def _check_stepped(self) -> None:
        if not self.begun:
            raise ForgottenCallError("body.step(score) was never called; call it after every epoch")

    def _check_calls(self) -> None:
        _ = self.host.optimizer  # raises ForgottenCallError before manage
        if self.optimizer_steps == 0 and not self._overflowed():
            raise ForgottenCallError(
                "the managed optimizer has not stepped since the last body.step(); is another "
                "optimizer in use? If a GradScaler skipped every step, call zero_grad() before the "
                "backward pass, not after the step"
            )
        norms = self.meter.result()["gradient_norm"]
        for index, slot in self.model.each_slot():
            if IS_ACTIVE[slot.stage] and norms[index] == 0.0:
                raise ForgottenCallError(
                    f"the seed at {slot.site.module} got no gradient in this epoch; "
                    "was the loss computed from another copy of the model?"
                )

    def _overflowed(self) -> bool:
        """Whether the last gradients are not finite: then a GradScaler skips the step."""
        grads = [p.grad for p in self.model.host_parameters() if p.grad is not None]
        return not all(bool(grad.isfinite().all()) for grad in grads)


@checked()
def attach(
    model: nn.Module,
    *,
    slots: SlotChoice | Slots = "auto",
    depth: Depth | str | None = None,
    evaluate: Callable[[], float],
    example: Any = None,
    steps: int | None = None,
    controller: str | Controller = "heuristic",
    budget: Budget | None = None,
    settings: GrowthSettings | None = None,
    key: int = 0,
) -> Body:
    """Let `model` grow in a user's own training loop, for `steps` epochs.

    `example` is one input of the model. `evaluate()` returns the current validation score of the
    model (higher is better, on any scale); to measure what a seed contributes it is called with the
    seed taken out. The other arguments are those of `grow`; `settings` about training are ignored.

    With several processes (DistributedDataParallel) call this and the methods of the body in all
    of them; `model` is the model or the DDP module around it.

    Raises ConfigError for arguments that cannot work.
    """
    check_parallel(model)
    given, processes, model = model, Processes.of(model), inner(model)
    check_model(model)
    spec = as_slots(slots, depth)
    example = spec.example if example is None else example
    if example is None:
        raise ConfigError("attach needs one input of the model; give example=...")
    own = grow_settings(settings, steps, budget, None, scheduled=True)
    network = GrownModule.wrap(
        model, spec.modules, example, spec.blueprints, layout=spec.layout, causal=spec.causal
    )
    with network.given_back():
        check_wrapper(given, network)
        chosen = find_controller(controller, len(network.sites), network.catalogue, spec.modules)
        check_script(chosen, network)
        processes.check_same(
            {
                **{f"the shape of {n}": tuple(p.shape) for n, p in model.named_parameters()},
                "the list of slots": ", ".join(network.slot_config.names),
                "the controller": chosen.name,
                "the number of steps": own.steps,
                "the key": key,
            }
        )
        host = AttachedHost(network, evaluate, example, key, processes, own.snapshots)
        history = History()
        env = GrowthCycle(host, own, recorder=history)
    warnings = GrowthWarnings(history, env, chosen)
    history.listeners = [warnings]
    warn_if_out_of_domain(chosen, type(network.host).__name__)
    return Body(host, env, chosen, history, warnings)
