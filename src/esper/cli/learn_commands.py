"""`esper train record`, `imitate` and `offline`. What they need loads when they run."""

from typing import Annotated

import typer

from esper.cli.train_app import train_app

__all__ = ["train_app"]

Task = Annotated[str, typer.Option(help="What the hosts learn; see `esper tasks`.")]
Number = Annotated[int, typer.Option("--episodes", min=2, help="How many episodes to record.")]
Steps = Annotated[
    int | None, typer.Option(min=1, help="Decisions per episode; each task has its default.")
]
Key = Annotated[int, typer.Option(min=0, help="Same key, same result.")]
Overwrite = Annotated[bool, typer.Option(help="Replace a run that is already there.")]


@train_app.command("record")
def record(
    controller: Annotated[
        str, typer.Option(help="Who decides: a controller, or the folder of a training run.")
    ] = "random",
    task: Task = "digits",
    episodes: Number = 64,
    steps: Steps = None,
    key: Key = 0,
    out: Annotated[
        str | None, typer.Option(help="Folder. Default: runs/recorded-TASK-SEED.")
    ] = None,
    overwrite: Overwrite = False,
) -> None:
    """Record episodes of a controller, to learn from them offline.

    Example: esper train record --controller random --episodes 64 --out runs/recorded
    """
    from esper.cli.learn_runs import Recording, run_record

    folder = out or f"runs/recorded-{task}-{key}"
    run_record(Recording(controller, task, episodes, steps, key, folder, overwrite))


@train_app.command("imitate")
def imitate(
    teacher: Annotated[
        str,
        typer.Option(
            "--from", help="Whom to imitate: a controller, or the folder of a training run."
        ),
    ] = "heuristic",
    task: Task = "digits",
    episodes: Number = 64,
    steps: Steps = None,
    epochs: Annotated[int, typer.Option(min=1, help="Passes over the episodes.")] = 60,
    key: Key = 0,
    out: Annotated[
        str | None, typer.Option(help="Folder for the policy. Default: runs/cloned-TASK-SEED.")
    ] = None,
    overwrite: Overwrite = False,
) -> None:
    """Learn to do what a controller does: a start for PPO.

    The folder it leaves is that of a policy, with the episodes it was learnt from.

    Examples:

      esper train imitate --from heuristic --task digits --episodes 64 --out runs/cloned

      esper train ppo --warm-start runs/cloned --out runs/warm
    """
    from esper.cli.learn_runs import Recording, run_imitate

    folder = out or f"runs/cloned-{task}-{key}"
    run_imitate(Recording(teacher, task, episodes, steps, key, folder, overwrite), epochs)


@train_app.command("offline")
def offline(
    episodes: Annotated[
        list[str],
        typer.Option(help="Run with recorded episodes; may be given more than once."),
    ],
    task: Task = "digits",
    expectile: Annotated[
        float, typer.Option(help="0.5: as good as the recorder; towards 1: the best it did.")
    ] = 0.9,
    beta: Annotated[
        float, typer.Option(help="How strongly to prefer what was better than usual.")
    ] = 5.0,
    key: Key = 0,
    out: Annotated[
        str | None, typer.Option(help="Folder for the policy. Default: runs/offline-TASK-SEED.")
    ] = None,
    overwrite: Overwrite = False,
) -> None:
    """Learn a policy from recorded episodes alone, by implicit Q-learning.

    Example: esper train offline --episodes runs/recorded --out runs/offline
    """
    from esper.cli.learn_runs import run_offline

    run_offline(
        episodes, task, expectile, beta, key, out or f"runs/offline-{task}-{key}", overwrite
    )
