"""Search settings of the heuristic on handwritten digits, and look at what they are worth.

Needs: pip install 'esper-grow[digits,tune]'

Settings are chosen on validation data. What they are worth is said by test data, on hosts with
other keys than those that chose, beside the heuristic as it is.
"""

import argparse

from esper import tuning
from esper.api import find_controller, one_thread
from esper.observatory import best_trial
from esper.tolaria import TrialRules, data_root, find_task, train


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--trials", type=int, default=20)
    parser.add_argument("--keys", type=int, default=8)
    parser.add_argument("--steps", type=int, default=30)
    given = parser.parse_args()

    plan = tuning.Plan(task="digits", trials=given.trials, keys=given.keys, steps=given.steps)
    hearing = tuning.Hearing(
        on_trial=lambda row: print(f"trial {row['round'] + 1}: {row['state']}, {row['val_score']}")
    )
    best = best_trial(tuning.tune(plan, "tuned", overwrite=True, hearing=hearing))
    print(f"best on validation: {best['val_score']:.2f}, settings in tuned/best.toml")

    task = find_task("digits")
    data = task.load(data_root())
    rules = TrialRules(given.steps, schedule=task.schedule)
    for name in ("heuristic", "heuristic:tuned/best.toml"):
        with one_thread():
            keys = range(given.keys)
            found = train(task.recipe(data), keys, rules, find_controller(name), task=task.name)
        scores = [task.score_on(each.model, data.test_x, data.test_y) for each in found]
        print(f"{name}: test accuracy {sum(scores) / len(scores):.2f}")


if __name__ == "__main__":
    main()
