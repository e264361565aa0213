"""proof: the one who compares.

Arms on paired keys, controls that make the comparison fair, and the statistics behind a claim.
"""

from esper.proof.arms import Plan, host_plan, host_size, train, training_macs
from esper.proof.evaluation import SIDE_BY_SIDE, TUNING_KEYS, evaluate
from esper.proof.families import FamilyTrial, family_trials, unseen_score
from esper.proof.record import Record
from esper.proof.report import Comparison, EvaluationReport, Trial
from esper.proof.rescue import Ways
from esper.proof.retraining import Found
from esper.proof.settings import FIRST_TUNING_KEY, EvaluationSettings
from esper.proof.statistics import PairedDifference, holm, paired_difference
from esper.proof.work import Alone, Crew, Job, Made, Piece, Run, carry_out, make

__all__ = [
    "FIRST_TUNING_KEY",
    "SIDE_BY_SIDE",
    "TUNING_KEYS",
    "Alone",
    "Comparison",
    "Crew",
    "EvaluationReport",
    "EvaluationSettings",
    "FamilyTrial",
    "Found",
    "Job",
    "Made",
    "PairedDifference",
    "Piece",
    "Plan",
    "Record",
    "Run",
    "Trial",
    "Ways",
    "carry_out",
    "evaluate",
    "family_trials",
    "holm",
    "host_plan",
    "host_size",
    "make",
    "paired_difference",
    "train",
    "training_macs",
    "unseen_score",
]
