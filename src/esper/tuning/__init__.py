"""Search settings of the heuristic, or of the training of a policy, with Optuna.

    tuning.tune(tuning.Plan(task="digits", trials=50), "runs/tuned")

leaves a run directory: a row for each trial in metrics.jsonl, and the best settings in best.toml,
which `esper grow --controller heuristic:FILE` or `esper train ppo --config FILE` takes. Decisions
are by validation scores alone. docs/tuning.md says more.
"""

from esper.leyline import PackageMissingError

try:
    import optuna as _  # noqa: F401
except ModuleNotFoundError:
    raise PackageMissingError("esper tune needs optuna", "tune") from None

from esper.tuning.plan import Plan, make_subject, plan_of, resume, tune
from esper.tuning.study import Hearing

__all__ = ["Hearing", "Plan", "make_subject", "plan_of", "resume", "tune"]
