"""The vectorised growth environment: E host trainings, one decision for each per epoch.

    reset:  new hosts -> warm-up epoch (not of trained ones) -> evaluate           -> situation
    step:   apply the actions -> train an epoch -> evaluate (with counterfactuals)
            -> governor -> lifecycle tick                                          -> transition

Gymnasium's order: the action comes first, its consequences follow, and the situation that comes
back is the one after all of them.
"""

import numpy as np

from esper.tamiyo.situation import Situation
from esper.tolaria.engine.cycle import GrowthCycle
from esper.tolaria.engine.population import Population, TrainReadings
from esper.tolaria.engine.transition import Transition


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
        """Hosts have been looked at as they came: that is what the best is compared with."""
        assert self.cooler is not None
        self._cool(self.running, self.affords(self.cooler.cost(self.garden.total_macs())))
        self.situation = self._look(situation.signals)
        return self.situation

    def step(self, actions: np.ndarray) -> Transition:
        """`actions` is int [E, 4] in the order of HEAD_NAMES. An illegal one raises
        InvalidStateMachineError and changes nothing."""
        self.begin(actions)
        return self.finish(self._train())

    def _train(self) -> TrainReadings:
        begin, self.progress = self.progress, self._next_progress()
        rates = None
        if self.settings.rates is not None:
            rates = self.settings.rates.factor(np.stack([begin, self.progress], axis=1))
        return self.population.train_epoch(self.running, self.step_count, rates)

    def _next_progress(self) -> np.ndarray:
        """[E]: how far each run is, from 0 to 1, when the epoch that comes is over.

        A budget is shared out among the epochs that it will pay for if hosts stay as they are, so
        that a schedule ends with the last of them, not with what is left over.
        """
        first = 1 if self.settings.trained else 0
        epochs, done = self.rules.max_steps + 1 - first, self.step_count - first
        if self.compute_budget.max_macs is None:
            return np.full(self.n_envs, (done + 1) / epochs)
        coming = np.clip(self.compute_budget.epochs(self.best), 1, epochs - done)
        return np.asarray(self.progress + (1.0 - self.progress) / coming)
