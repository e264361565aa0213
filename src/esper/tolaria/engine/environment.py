"""The vectorised growth environment: E host trainings, one decision for each per epoch.

    reset:  new hosts -> warm-up epoch (not of trained ones) -> evaluate           -> situation
    step:   apply the actions -> train an epoch -> evaluate (with counterfactuals)
            -> governor -> lifecycle tick                                          -> transition

The order is that of Gymnasium: a step returns the situation after its actions and the epoch.
"""

import numpy as np

from esper.tamiyo.situation import Situation
from esper.tolaria.engine.cycle import GrowthCycle
from esper.tolaria.engine.event_log import Transition
from esper.tolaria.engine.population import Population, TrainReadings


class GrowthEnv(GrowthCycle):
    """E environments that train their own hosts; a controller's loop needs `reset` and `step`."""

    population: Population

    def reset(self) -> Situation:
        """Train the hosts for one epoch, or only evaluate trained ones; call it once."""
        self.start()
        if self.settings.trained:
            situation = self.finish(TrainReadings.nothing(self.n_envs)).after
            return situation if self.cooler is None else self._cool_at_first(situation)
        return self.finish(self._train()).after

    def _cool_at_first(self, situation: Situation) -> Situation:
        """After the first evaluation, so that the original hosts count for the best epoch."""
        assert self.cooler is not None
        self._cool(self.running, self.affords(self.cooler.cost(self.garden.total_macs())))
        self.situation = self._situation(situation.signals)
        return self.situation

    def step(self, actions: np.ndarray) -> Transition:
        """`actions` is int [E, 4] in the order of HEAD_NAMES. Raises InvalidStateMachineError, and
        changes nothing, if one is illegal."""
        self.begin(actions)
        return self.finish(self._train())

    def _train(self) -> TrainReadings:
        begin, self.progress = self.progress, self._next_progress()
        rates = None
        if self.settings.rates is not None:
            rates = self.settings.rates.factor(np.stack([begin, self.progress], axis=1))
        return self.population.train_epoch(self.running, self.step_count, rates)

    def _next_progress(self) -> np.ndarray:
        """[E]: the progress of each run, from 0 to 1, at the end of the next epoch.

        A budget is divided among the epochs that it covers for the current hosts, so that a
        schedule ends with the last of them.
        """
        first = 1 if self.settings.trained else 0
        epochs, done = self.settings.max_steps + 1 - first, self.step_count - first
        if self.compute_budget.max_macs is None:
            return np.full(self.n_envs, (done + 1) / epochs)
        coming = np.clip(self.compute_budget.epochs(self.best), 1, epochs - done)
        return np.asarray(self.progress + (1.0 - self.progress) / coming)
