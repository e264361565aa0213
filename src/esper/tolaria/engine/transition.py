"""The result of a step of the environment."""

from dataclasses import dataclass

import numpy as np

from esper.tamiyo.situation import Situation


@dataclass(frozen=True)
class Transition:
    """One step of E environments: situation, actions, situation.

    acted        bool[E], the environment was running when the step began
    terminated   bool[E], the governor ended the episode
    truncated    bool[E], the episode reached its length
    ended        bool[E], either of them: no decision follows
    rolled_back  bool[E], the governor restored the host
    train_macs   int[E], multiply-adds spent in this step, evaluations included
    host_macs    int[E], the multiply-adds of the host alone
    final_score, final_params   float[E], of the settled networks of ended episodes; NaN elsewhere,
                 None if none was settled
    """

    before: Situation
    actions: np.ndarray
    after: Situation
    acted: np.ndarray
    terminated: np.ndarray
    truncated: np.ndarray
    rolled_back: np.ndarray
    train_macs: np.ndarray
    host_macs: np.ndarray
    final_score: np.ndarray | None = None
    final_params: np.ndarray | None = None

    @property
    def ended(self) -> np.ndarray:
        return self.terminated | self.truncated
