"""proof: comparison of controllers.

Arms are trained on paired keys, together with control arms, and compared statistically.
"""

from esper.proof.evaluation import EvaluationSettings, evaluate

__all__ = ["EvaluationSettings", "evaluate"]
