"""Search settings of the heuristic on handwritten digits with Optuna.

Needs: pip install 'esper-grow[digits]' optuna

Settings are chosen on validation data, with keys that no evaluation uses. The best of many settings
is also the luckiest: compare it with `esper evaluate --arms heuristic,heuristic:tuned.toml`.
"""

import argparse
from pathlib import Path

import optuna

from esper.api import find_controller, one_thread
from esper.leyline.growth_settings import GrowthSettings
from esper.tolaria.data.catalogue import data_root
from esper.tolaria.engine.run import play_run
from esper.tolaria.fused.choice import choose_population
from esper.tolaria.tasks import find_task


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--trials", type=int, default=20)
    parser.add_argument("--keys", type=int, default=8)
    parser.add_argument("--steps", type=int, default=30)
    given = parser.parse_args()

    task, file = find_task("digits"), Path("tuned.toml")
    recipe = task.recipe(task.load(data_root()))
    kind = choose_population(recipe, given.keys)
    rules = GrowthSettings(given.steps, schedule=task.schedule, population=kind)
    keys = range(1_000_000, 1_000_000 + given.keys)  # evaluations use smaller keys

    def validation_score(trial: optuna.Trial) -> float:
        settings = (
            f"min_epochs_before_germinate = {trial.suggest_int('wait', 0, given.steps // 2)}\n"
            f"min_improvement_to_fossilize = {trial.suggest_float('keep', 0.03, 3.0, log=True)}\n"
            f'blend = "{trial.suggest_categorical("blend", ["linear", "sigmoid", "gated"])}"\n'
        )
        file.write_text(settings)
        trial.set_user_attr("settings", settings)
        with one_thread():
            controller = find_controller(f"heuristic:{file}")
            found = play_run(recipe, keys, rules, controller, task=task.name)
        if found[0].outcome.ended == "interrupted":
            raise KeyboardInterrupt
        return sum(each.outcome.val_score for each in found) / len(found)

    study = optuna.create_study(direction="maximize", sampler=optuna.samplers.TPESampler(seed=0))
    study.optimize(validation_score, n_trials=given.trials)
    file.write_text(study.best_trial.user_attrs["settings"])
    print(f"validation accuracy {study.best_value:.2f} with {file}:\n{file.read_text()}")


if __name__ == "__main__":
    main()
