"""`esper train ppo`. What it needs loads when it runs."""

from typing import Annotated

import typer

from esper.cli.train_app import train_app

__all__ = ["train_app"]


@train_app.command("ppo")
def ppo(
    task: Annotated[str | None, typer.Option(help="What the hosts learn; default digits.")] = None,
    rounds: Annotated[
        int | None, typer.Option(min=1, help="Rounds to play and learn from; default 200.")
    ] = None,
    envs: Annotated[
        int | None, typer.Option(min=1, help="Host trainings per round; default 16.")
    ] = None,
    steps: Annotated[
        int | None, typer.Option(min=1, help="Decisions per episode; each task has its default.")
    ] = None,
    key: Annotated[
        int | None, typer.Option(min=0, help="Same key, same run, bit for bit; default 0.")
    ] = None,
    out: Annotated[
        str | None, typer.Option(help="Folder for the run. Default: runs/ppo-TASK-SEED.")
    ] = None,
    config: Annotated[
        str | None, typer.Option(help="TOML file with settings; flags override it.")
    ] = None,
    resume: Annotated[
        str | None, typer.Option(help="Go on with the run in this folder instead.")
    ] = None,
    workers: Annotated[
        int | None,
        typer.Option(
            min=1, help="Processes for the hosts; changes nothing but the speed. Default 1."
        ),
    ] = None,
    devices: Annotated[
        str | None,
        typer.Option(help="One worker on each of these instead, such as cuda:0,cuda:1."),
    ] = None,
    reward: Annotated[
        str | None,
        typer.Option(help="objective (default), shaped, simplified, sparse, minimal or loss."),
    ] = None,
    ab_reward: Annotated[
        str | None, typer.Option(help="Reward mode of the second half of the environments.")
    ] = None,
    learning_rate: Annotated[float | None, typer.Option(help="Of the policy.")] = None,
    entropy_coef: Annotated[
        float | None, typer.Option(help="How much trying things out is worth.")
    ] = None,
    gamma: Annotated[float | None, typer.Option(help="Discount of later rewards.")] = None,
    warm_start: Annotated[
        str | None, typer.Option(help="Run whose policy to start from, such as an imitation.")
    ] = None,
    profile: Annotated[
        int | None,
        typer.Option(min=0, help="Trace this round (the first is 0) to RUN/profile, for Perfetto."),
    ] = None,
    overwrite: Annotated[bool, typer.Option(help="Replace a run that is already there.")] = False,
) -> None:
    """Train a policy by PPO over many host trainings.

    Ctrl-C ends the run after its round, with a checkpoint; a second Ctrl-C ends it after the step,
    and the round is played again by --resume.

    Examples:

      esper train ppo --task digits --rounds 200 --envs 16 --out runs/first

      esper train ppo --resume runs/first

      esper grow --controller runs/first
    """
    from esper.cli.train_ppo_command import PPOCommand, run

    flags = {
        "task": task,
        "rounds": rounds,
        "envs": envs,
        "steps": steps,
        "key": key,
        "reward_mode": reward,
        "ab_reward_mode": ab_reward,
        "warm_start": warm_start,
        "ppo.learning_rate": learning_rate,
        "ppo.entropy_coef": entropy_coef,
        "ppo.gamma": gamma,
    }
    run(PPOCommand(flags, config, out, resume, workers, devices, profile, overwrite))
