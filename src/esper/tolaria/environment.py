"""The vectorised growth environment: E host trainings, one decision for each per epoch.

    reset:  new hosts -> warm-up epoch (not of trained ones) -> evaluate           -> situation
    step:   apply the actions -> train an epoch -> evaluate (with counterfactuals)
            -> governor -> lifecycle tick                                          -> transition

Gymnasium's order: the action comes first, its consequences follow, and the situation that comes
back is the one after all of them.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from esper.growth import LifecycleRules
from esper.tamiyo import Situation, TrialPlan, TrialScores
from esper.tolaria.cycle import GrowthCycle
from esper.tolaria.population import Population, TrainReadings
from esper.tolaria.schedule import RateSchedule
from esper.tolaria.transition import Transition
from esper.tolaria.trials import PART


class GrowthEnv(GrowthCycle):
    """E environments that train their own hosts: `reset` and `step` are all a controller's loop
    needs. `schedule` is that of the learning rate; the other settings are those of `GrowthCycle`.
    """

    population: Population

    def __init__(
        self,
        population: Population,
        rules: LifecycleRules,
        *,
        schedule: RateSchedule | None = None,
        **settings: Any,
    ) -> None:
        super().__init__(population, rules, **settings)
        self.schedule = schedule

    def reset(self, topology: Sequence[tuple[int, int]] = ()) -> Situation:
        """Warm up the hosts for an epoch, or only look at trained ones; call it once. `topology`
        lists (slot, blueprint) pairs that every host has from birth, as fossils."""
        self.start(topology)
        if self.start_from == "trained":
            situation = self.finish(TrainReadings.nothing(self.n_envs)).after
            return situation if self.cooler is None else self._cool_at_first(situation)
        return self.finish(self._train()).after

    def _cool_at_first(self, situation: Situation) -> Situation:
        """Hosts have been looked at as they came: that is what the best is compared with."""
        assert self.cooler is not None
        self._cool(self.running, self.affords(self.cooler.cost(self.garden.total_macs())))
        self.situation = self._look(situation.signals)
        return self.situation

    def try_candidates(self, plan: TrialPlan, envs: np.ndarray) -> Situation:
        """Find out what candidates would bring to some running hosts (bool[E]) before the next
        step; the situation then has it. A host whose budget does not pay for trials as planned has
        shorter ones; whose budget does not pay for these either has none."""
        assert self.situation is not None, "reset comes before the first trial"
        garden, situation = self.garden, self.situation
        tried = plan.candidates(situation.masks, situation.catalogue)
        tried &= (envs & self.running)[:, None, None]
        short = plan.shortened()
        paid, short_paid = (self._trials_paid(tried, each) for each in (plan, short))
        tried &= (paid | short_paid)[:, None, None]
        if not tried.any():
            return situation
        gain, error = np.full((2, *tried.shape), np.nan)
        spent = np.zeros(self.n_envs, dtype=np.int64)
        for each, whose in ((plan, paid), (short, ~paid)):
            own = tried & whose[:, None, None]
            if own.any():
                found = self.population.try_candidates(own, each, self.step_count)
                gain[own], error[own] = found.gain[own], found.error[own]
                spent += garden.trial_macs(own, found)
        garden.train_macs += spent
        self.macs_between += spent
        limits = garden.limits
        scores = TrialScores(gain, error, limits.params, limits.macs, self.step_count)
        for env in np.flatnonzero(tried.any(axis=(1, 2))).tolist():
            self.recorder.event(garden.narrator.trials(scores, env, int(spent[env])))
        self.situation = replace(self._look(situation.signals), trials=scores)
        return self.situation

    def _trials_paid(self, tried: np.ndarray, plan: TrialPlan) -> np.ndarray:
        """bool[E]: would the budget pay for another epoch after these trials?"""
        if self.purse.max_macs is None:
            return np.ones(self.n_envs, dtype=bool)
        most = replace(plan, val_samples=plan.val_samples + PART)
        return self.affords(self.trial_macs(tried, most))

    def trial_macs(self, tried: np.ndarray, plan: TrialPlan) -> np.ndarray:
        """int[E]: what trials of `tried` (bool[E, S, B]) would cost in multiply-adds, if there are
        as many examples as the plan says."""
        nothing = self.population.try_candidates(np.zeros_like(tried), plan, self.step_count)
        expected = replace(
            nothing, train_samples=plan.steps * plan.batch, val_samples=plan.val_samples
        )
        return self.garden.trial_macs(tried, expected)

    def step(self, actions: np.ndarray) -> Transition:
        """`actions` is int [E, 4] in the order of HEAD_NAMES. An illegal one raises
        InvalidStateMachineError and changes nothing."""
        self.begin(actions)
        return self.finish(self._train())

    def _train(self) -> TrainReadings:
        begin, self.progress = self.progress, self._next_progress()
        rates = None
        if self.schedule is not None:
            rates = self.schedule.factor(np.stack([begin, self.progress], axis=1))
        return self.population.train_epoch(self.running, self.step_count, rates)

    def _next_progress(self) -> np.ndarray:
        """[E]: how far each run is, from 0 to 1, when the epoch that comes is over.

        A budget is shared out among the epochs that it will pay for if hosts stay as they are, so
        that a schedule ends with the last of them, not with what is left over.
        """
        first = 1 if self.start_from == "trained" else 0
        epochs, done = self.rules.max_steps + 1 - first, self.step_count - first
        if self.purse.max_macs is None:
            return np.full(self.n_envs, (done + 1) / epochs)
        coming = np.clip(self.purse.epochs(self.best), 1, epochs - done)
        return np.asarray(self.progress + (1.0 - self.progress) / coming)
