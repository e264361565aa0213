"""proof: comparison of controllers.

Arms are trained on paired keys, together with control arms, and compared statistically.
"""

from esper.proof.evaluation import evaluate
from esper.proof.settings import EvaluationSettings

__all__ = ["EvaluationSettings", "evaluate"]
