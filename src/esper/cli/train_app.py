"""The group `esper train`; its commands register themselves."""

import typer

train_app = typer.Typer(no_args_is_help=True, help="Learn when and what to grow.")
