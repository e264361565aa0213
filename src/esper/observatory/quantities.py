"""Every quantity that a view shows: its label, its meaning, and what a bad value looks like."""

from typing import NamedTuple

from esper.leyline import HEAD_NAMES


class Quantity(NamedTuple):
    label: str
    meaning: str
    bad: str


def _table(*rows: tuple[str, str, str, str]) -> dict[str, Quantity]:
    return {column: Quantity(*texts) for column, *texts in rows}


# fmt: off
# By the column in the row of a round.
POLICY = _table(
    ("return", "return", "mean sum of rewards of an episode", "falling, or flat from the start"),
    ("val_score", "score", "mean validation score of the resulting networks",
     "below that of hosts without growth"),
    ("unseen_score", "validation hosts",
     "mean validation score on hosts that the policy does not learn from, with its most probable "
     "actions", "falling while the score rises"),
    ("entropy", "entropy", "how random the policy acts: 0 deterministic, 1 uniform",
     "below 0.1 early in training"),
    ("approx_kl", "KL", "how far one update moved the policy", "above 0.1: updates are too large"),
    ("explained_variance", "explained variance",
     "how well the critic predicts returns: 1 exactly, 0 no better than a constant",
     "below 0 after a quarter of the run"),
    ("clip_fraction", "clip fraction", "share of decisions whose gradient was clipped",
     "above 0.3, or always 0"),
    ("grad_norm", "gradient norm", "norm of the policy's gradient before clipping",
     "0, or growing tenfold"),
    ("value_loss", "value loss", "squared error of the critic", "growing"),
    ("params", "parameters", "mean size of the resulting networks", "at the budget"),
    ("germinated", "planted", "seeds planted per episode", "0 round after round"),
    ("fossilized", "kept", "seeds kept per episode", "0 round after round"),
    ("culled", "removed", "seeds removed per episode", "nearly all that were planted"),
    ("rollbacks", "rollbacks", "networks that failed and were restored", "frequent"),
    ("gradient_health", "gradient health", "1 without vanishing or exploding gradients",
     "below 0.8"),
    *((f"{head}_entropy", f"{head} entropy", f"entropy of the choice of the {head}", "below 0.1")
      for head in HEAD_NAMES),
    *((f"{head}_grad_norm", f"{head} gradient", f"gradient norm of the {head} head",
       "0, or growing tenfold") for head in (*HEAD_NAMES, "value")),
)

# By the column in the row of an epoch.
HOST = _table(
    ("val_score", "score", "score of the network on validation data, 0 to 100",
     "falling while the training score rises"),
    ("train_score", "training score", "score of the network on its training data",
     "far above the validation score"),
    ("params", "parameters", "size of the network including its seeds",
     "growing while the score stays flat"),
    ("macs", "multiply-adds", "cost of one forward pass of one example",
     "growing while the score stays flat"),
    ("train_macs", "cost", "multiply-adds of all training and evaluation, removed seeds included",
     "above the compute budget"),
    ("alpha", "alpha", "how far a seed is blended in: 0 not at all, 1 fully", "stays below 1"),
    ("contribution", "contribution", "points of score that are lost without the seed", "below 0"),
)
# fmt: on
