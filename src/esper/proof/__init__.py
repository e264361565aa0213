"""proof: the one who compares.

Arms on paired keys, controls that make the comparison fair, and the statistics behind a claim.
"""

from esper.proof.arms import Plan, host_plan, train
from esper.proof.evaluation import evaluate
from esper.proof.families import FamilyTrial, family_trials, unseen_score
from esper.proof.record import Record
from esper.proof.report import Comparison, EvaluationReport, Trial
from esper.proof.rescue import Ways
from esper.proof.settings import EvaluationSettings
from esper.proof.statistics import PairedDifference, holm, paired_difference
from esper.proof.work import Alone, Crew, Job, Made, Piece, Run, carry_out, make
