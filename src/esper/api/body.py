"""`attach`: growth inside a training loop of the user's own.

body = esper.attach(model, slots=["layer1"], example=x, evaluate=lambda: accuracy(model), steps=30)
body.manage(optimizer)
for epoch in range(30):
    train(model, optimizer)
    body.step(accuracy(model))
body.finish()
"""

from collections.abc import Callable, Sequence
from typing import Any, Literal

import numpy as np
from torch import nn
from torch.optim import Optimizer

from esper.api.checks import MEASURED, check_optimizer, checked, require
from esper.api.controllers import check_script, find_controller
from esper.api.watch import Watch, warn_of_another_task, warn_of_slow_seeds
from esper.growth import (
    BlueprintCatalogue,
    GrownModule,
    HostSnapshot,
    Layouts,
    LifecycleRules,
    SlotChoice,
    add_slot_groups,
    evaluating,
    export,
    restore_snapshot,
    sync_slot_group,
    take_snapshot,
)
from esper.leyline import (
    IS_ACTIVE,
    ConfigError,
    EpisodeOutcome,
    ForgottenCallError,
    History,
    SeedStage,
)
from esper.tamiyo import Controller
from esper.tolaria import Budget, Evaluation, GradientMeter, GrowthCycle, TrainReadings, settle

# Some loops evaluate several times per epoch; none evaluates this often and means to grow.
MOST_EVALUATIONS_BETWEEN_STEPS = 20


class AttachedHost:
    """One host whose epochs somebody else trains."""

    def __init__(
        self, network: GrownModule, evaluate: Callable[[], float], example: Any, key: int
    ) -> None:
        self.network, self.user_evaluate, self.example = network, evaluate, example
        self.keys = np.array([key], dtype=np.int64)
        self.optimizer: Optimizer | None = None
        self.reported: tuple[float, float] | None = None

    @property
    def template(self) -> GrownModule:
        return self.network

    def managed(self) -> Optimizer:
        if self.optimizer is None:
            raise ForgottenCallError(
                "no optimiser is managed: call body.manage(optimizer) before the first epoch, "
                "or new parameters would never be trained"
            )
        return self.optimizer

    def germinate(self, env: int, slot: int, blueprint: int, blend: int, key: int) -> None:
        self.network.germinate(slot, blueprint, blend, key)
        self._sync(slot)

    def remove(self, env: int, slot: int) -> None:
        self.network.remove(slot)
        self._sync(slot)

    def set_blend(self, env: int, slot: int, stage: SeedStage, alpha: float) -> None:
        self.network.set_blend(slot, stage, alpha)
        self._sync(slot)

    def _sync(self, slot: int) -> None:
        params = self.network.seed_parameters(slot)
        sync_slot_group(self.managed(), self.network.sites[slot].slot_id, params)

    def evaluate(self, envs: np.ndarray, present: np.ndarray) -> Evaluation:
        """The user's evaluation of every coalition; what was just reported is not asked again."""
        loss, score = np.full((2, len(present)), np.nan)
        complete = np.asarray(present.all(axis=1))
        has_valve = any(slot.valve is not None for _, slot in self.network.each_slot())
        with evaluating(self.network):
            for k, coalition in enumerate(present):
                # The alpha that valves apply shows only in a pass over the whole network.
                if not complete[k] or has_valve or self.reported is None:
                    with self.network.coalition(coalition.tolist()):
                        given = self.user_evaluate()
                        require("what evaluate() gives", given, MEASURED)
                        score[k] = float(given)
        if self.reported is not None:
            loss[complete], score[complete] = self.reported
            self.reported = None
        alpha = np.array([slot.applied_alpha() for _, slot in self.network.each_slot()])
        return Evaluation(loss, score, np.tile(alpha, (len(present), 1)), samples=0)

    def snapshot(self, envs: np.ndarray) -> list[HostSnapshot]:
        return [take_snapshot(self.network, self.managed())]

    def restore(self, envs: np.ndarray, snapshots: Sequence[HostSnapshot]) -> None:
        restore_snapshot(self.network, self.managed(), snapshots[0])

    def export(self, env: int) -> nn.Module:
        return export(self.network, self.example)


class Body:
    """A model that grows inside a loop of the user's own.

    Call `manage(optimizer)` once, then `step(validation_score)` after every epoch.
    """

    def __init__(
        self, host: AttachedHost, env: GrowthCycle, controller: Controller, history: History
    ) -> None:
        self.host, self.env, self.controller = host, env, controller
        self.recorder = history
        self.outcome: EpisodeOutcome | None = None
        self.optimizer_steps = 0
        self.evaluations = 0
        self.in_evaluation = False
        self.meter = GradientMeter(host.network)
        host.network.host.register_forward_pre_hook(self._watch_forward)
        controller.reset(1)

    @property
    def model(self) -> GrownModule:
        """The live network; calling it or the model itself is the same."""
        return self.host.network

    @property
    def history(self) -> list[dict[str, Any]]:
        return self.recorder.rows

    @checked()
    def manage(self, optimizer: Optimizer, *schedulers: Any) -> None:
        """Let `optimizer` follow the growth: one parameter group per slot, empty at first.

        Schedulers that exist already must be given too; those made later need not.
        """
        if self.host.optimizer is not None:
            raise ConfigError("an optimiser is managed already; one body has one optimiser")
        check_optimizer(optimizer, self.model.host_parameters())
        warn_of_slow_seeds(optimizer)
        add_slot_groups(optimizer, self.model.slot_config.slot_ids, schedulers)
        self.host.optimizer = optimizer
        optimizer.register_step_pre_hook(self._watch_optimizer)
        self.env.start()

    @checked()
    def step(self, validation_score: float, validation_loss: float | None = None) -> bool:
        """Report an epoch; the controller then decides and the model may change.

        Gives False once all steps are done: the model trains on but changes no more. A loss that
        is not finite, or a score, makes the governor restore the last healthy epoch. Raises
        ForgottenCallError if the epoch cannot have trained the network.
        """
        self._check_calls()
        if not self.env.running[0]:
            return False
        # Without a loss the governor can still see that a score is not a number.
        loss = validation_loss if validation_loss is not None else validation_score * 0.0
        self.host.reported = (float(loss), float(validation_score))
        transition = self.env.finish(self._readings())
        if transition.after.running[0]:
            self.env.begin(self.controller.act(transition.after))
        self.meter = GradientMeter(self.model)
        self.optimizer_steps = self.evaluations = 0
        return bool(transition.after.running[0])

    def finish(self) -> EpisodeOutcome:
        """Bring the model back to its best epoch, drop seeds that do not help, sum up."""
        if self.env.situation is None:
            raise ForgottenCallError("nothing grew: body.step(score) was never called")
        (self.outcome,) = settle(
            self.env,
            np.ones(1, dtype=bool),
            task=type(self.model.host).__name__,
            controller=self.controller.name,
        )
        return self.outcome

    def export(self) -> nn.Module:
        """A plain module for use without Esper, checked to give the live network's output."""
        if self.env.situation is None:
            raise ForgottenCallError("nothing grew: body.step(score) was never called")
        return self.host.export(0)

    def _readings(self) -> TrainReadings:
        return TrainReadings(
            loss=np.array([np.nan]),
            score=np.array([np.nan]),
            finite=np.array([True]),
            batches=self.optimizer_steps,
            samples=0,
            seeds={name: column[None] for name, column in self.meter.result().items()},
        )

    def _watch_optimizer(self, *args: Any) -> None:
        self.optimizer_steps += 1
        self.meter.observe()

    def _watch_forward(self, module: nn.Module, args: Any) -> None:
        if module.training and self.in_evaluation:
            self.evaluations += 1
            if self.evaluations > MOST_EVALUATIONS_BETWEEN_STEPS and self.env.running[0]:
                raise ForgottenCallError(
                    f"the model was evaluated {self.evaluations} times without "
                    "body.step(score); call it after every epoch, or nothing grows"
                )
        self.in_evaluation = not module.training

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
    slots: SlotChoice,
    example: Any,
    evaluate: Callable[[], float],
    steps: int,
    layout: Layouts | None = None,
    causal: bool | None = None,
    controller: str | Controller = "heuristic",
    budget: Budget | None = None,
    key: int = 0,
    blueprints: BlueprintCatalogue | None = None,
    incubation: Literal["isolated", "joint"] = "isolated",
    max_seeds: int | None = None,
) -> Body:
    """Make `model` able to grow in a loop of the user's own, for `steps` epochs.

    `evaluate()` gives the validation score of the model as it is (0-100, higher is better); it is
    called with one seed after another taken out, to see what each contributes. The other
    arguments are those of `grow`. Raises ConfigError for arguments that cannot work.
    """
    network = GrownModule.wrap(model, slots, example, blueprints, layout=layout, causal=causal)
    chosen = find_controller(controller, len(network.sites), network.catalogue)
    check_script(chosen, network)
    host = AttachedHost(network, evaluate, example, key)
    history = History()
    env = GrowthCycle(
        host,
        LifecycleRules(max_steps=steps, incubation=incubation),
        budget=budget,
        max_seeds=max_seeds,
        on_panic="continue",
        recorder=history,
        keep_best=True,
    )
    history.listeners = [Watch(history, env, chosen)]
    warn_of_another_task(chosen, type(model).__name__)
    return Body(host, env, chosen, history)
