"""Every quantity that a view shows: its name, what it is, and what a bad value looks like."""

from typing import NamedTuple

from esper.leyline import HEAD_NAMES


class Quantity(NamedTuple):
    label: str
    meaning: str
    bad: str


# By the column of the round's row.
POLICY = {
    "return": Quantity(
        "return", "mean sum of rewards of an episode", "falling, or flat from the start"
    ),
    "val_score": Quantity(
        "score", "mean validation score of the networks that were kept", "below doing nothing"
    ),
    "unseen_score": Quantity(
        "unseen",
        "mean validation score on hosts that it does not learn from, by its likeliest actions",
        "falling while the score rises",
    ),
    "entropy": Quantity(
        "entropy", "how undecided the policy is: 0 sure, 1 any action", "below 0.1 early on"
    ),
    "approx_kl": Quantity(
        "KL", "how far one update moved the policy", "above 0.1: the steps are too large"
    ),
    "explained_variance": Quantity(
        "explained variance",
        "how well the critic foresees returns: 1 exactly, 0 like a constant",
        "below 0 after a quarter of the run",
    ),
    "clip_fraction": Quantity(
        "clip fraction", "share of decisions whose gradient was cut off", "above 0.3, or always 0"
    ),
    "grad_norm": Quantity(
        "gradient norm", "size of the policy's gradient before clipping", "0, or growing tenfold"
    ),
    "value_loss": Quantity("value loss", "squared error of the critic", "growing"),
    "params": Quantity("parameters", "mean size of the networks that were kept", "at the budget"),
    "germinated": Quantity("germinated", "seeds planted in an episode", "0 round after round"),
    "fossilized": Quantity("kept", "seeds kept in an episode", "0 round after round"),
    "culled": Quantity("culled", "seeds removed in an episode", "nearly all that were planted"),
    "rollbacks": Quantity("rollbacks", "networks that broke and were restored", "any, often"),
    "gradient_health": Quantity(
        "gradient health", "1 without vanishing or exploding tensors", "below 0.8"
    ),
    **{
        f"{head}_entropy": Quantity(
            f"{head} entropy", f"how undecided the head is that chooses the {head}", "below 0.1"
        )
        for head in HEAD_NAMES
    },
    **{
        f"{head}_grad_norm": Quantity(
            f"{head} gradient", f"gradient norm of the head for {head}", "0, or growing tenfold"
        )
        for head in (*HEAD_NAMES, "value")
    },
}

HOST = {
    "val_score": Quantity(
        "score", "of the network on validation data, 0 to 100", "falling while the training's rises"
    ),
    "train_score": Quantity("training score", "of the network on its training data", "far above"),
    "params": Quantity("parameters", "of the whole network with its seeds", "growing, score flat"),
    "macs": Quantity("multiply-adds", "of one forward pass of one example", "growing, score flat"),
    "train_macs": Quantity(
        "bill",
        "multiply-adds of all training and evaluation, rejected seeds included",
        "above what was to be spent",
    ),
    "alpha": Quantity("alpha", "how far a seed is blended in: 0 not, 1 fully", "stuck below 1"),
    "contribution": Quantity(
        "contribution", "points of score that are lost without the seed", "below 0"
    ),
}
