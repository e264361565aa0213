"""Write rlax.json: advantages, and clipped surrogates with gradients, as rlax computes them.

Run it where rlax is installed (it needs jax, which is large, so the tests only read the result):
    python tests/simic/agent/golden/make_rlax_golden.py
"""

import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import rlax

GAMMA, LAMBDA, CLIP = 0.97, 0.9, 0.2


def gae_row(row: dict) -> list[float]:
    """rlax knows no truncation, so each stretch up to one is a sequence with its own bootstrap."""
    pieces, start, length = [], 0, len(row["rewards"])
    for t in range(length):
        if row["truncated"][t] or t == length - 1:
            stretch = slice(start, t + 1)
            values = [*row["values"][stretch], row["bootstrap_values"][t]]
            discounts = [GAMMA * (1.0 - done) for done in row["terminated"][stretch]]
            pieces.append(
                rlax.truncated_generalized_advantage_estimation(
                    jnp.array(row["rewards"][stretch]),
                    jnp.array(discounts),
                    LAMBDA,
                    jnp.array(values),
                )
            )
            start = t + 1
    return np.concatenate(pieces).tolist()


def gae_cases(rng: np.random.Generator) -> list[dict]:
    cases = []
    for length in (1, 2, 7, 25, 25, 40):
        ends = rng.choice(3, size=length, p=[0.8, 0.1, 0.1])
        row = {
            "rewards": rng.normal(size=length).tolist(),
            "values": rng.normal(size=length).tolist(),
            "bootstrap_values": rng.normal(size=length).tolist(),
            "terminated": (ends == 1).tolist(),
            "truncated": (ends == 2).tolist(),
        }
        cases.append(row | {"advantages": gae_row(row)})
    return cases


def surrogate_cases(rng: np.random.Generator) -> list[dict]:
    cases = []
    for size in (1, 5, 64):
        ratios = np.exp(rng.normal(scale=0.4, size=size))
        advantages = rng.normal(size=size)
        loss, gradient = jax.value_and_grad(rlax.clipped_surrogate_pg_loss)(
            jnp.array(ratios), jnp.array(advantages), CLIP
        )
        cases.append(
            {
                "ratios": ratios.tolist(),
                "advantages": advantages.tolist(),
                "loss": float(loss),
                "gradient": gradient.tolist(),
            }
        )
    return cases


def main() -> None:
    jax.config.update("jax_enable_x64", True)
    rng = np.random.default_rng(0)
    golden = {
        "rlax": rlax.__version__,
        "gamma": GAMMA,
        "lambda": LAMBDA,
        "clip": CLIP,
        "gae": gae_cases(rng),
        "surrogate": surrogate_cases(rng),
    }
    Path(__file__).with_name("rlax.json").write_text(json.dumps(golden, indent=1) + "\n")


if __name__ == "__main__":
    main()
