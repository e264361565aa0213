"""`esper advise`: train a task's host, and say what to do with it."""

from dataclasses import dataclass, replace

from esper.cli.options import option
from esper.cli.printing import AS_JSON, QUIET, consoles, print_json
from esper.leyline.constants import MOST_COUNT, MOST_KEY


@dataclass(frozen=True)
class AdviseSettings:
    task: str = option("digits", "What the host has learnt; see `esper tasks`.")
    extra: float = option(0.3, "What may be spent further, as a share of the host's training.")
    key: int = option(0, "Same key, same host and same advice.", min=0, max=MOST_KEY)
    steps: int | None = option(
        None,
        "Epochs of the host's training after the first; each task has its default.",
        min=1,
        max=MOST_COUNT,
    )
    quiet: bool = option(False, QUIET)
    json: bool = option(False, AS_JSON)


def advise(settings: AdviseSettings) -> None:
    """Train a task's network to its end, and say what to do with it: grow it, continue, or retrain
    a wider one.

    The advice itself takes about a tenth of the extra budget. For a model of your own there is
    `esper.advise`.

    Examples:

      esper advise --task digits

      esper advise --task digits --extra 1.0 --json
    """
    from esper.api import one_thread
    from esper.observatory import StepProgress, say
    from esper.tamiyo import StaticController
    from esper.tolaria import TrialRules, check_extra, data_root, find_task, train
    from esper.tolaria import advise as advise_on

    task = find_task(settings.task)
    steps, (console, result) = settings.steps or task.steps, consoles(settings.quiet, settings.json)
    epochs = steps + 1  # the warm-up epoch comes before the first step
    check_extra(settings.extra, epochs)
    recipe = task.recipe(task.load(data_root()))
    rules = TrialRules(steps, counterfactuals=False, keep_best=False, schedule=task.schedule)
    with one_thread():
        with StepProgress(console, "host", steps) as progress:
            (host,) = train(
                recipe,
                [settings.key],
                rules,
                StaticController(),
                task=task.name,
                recorder=progress,
                attribute=False,
            )
        trained = replace(recipe, weights={settings.key: host.model.state_dict()})
        advice = advise_on(trained, settings.key, extra=settings.extra, epochs=epochs)
    console.print()
    say(result, str(advice), whole=True)
    if settings.json:
        print_json(advice.as_dict())
