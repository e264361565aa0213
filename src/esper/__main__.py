"""Where the command starts: it can be stopped from its first moment, without a traceback."""

import os
import signal

INTERRUPTED = 130  # what a shell expects of a command that Ctrl-C has ended


def main() -> None:
    """Run the command; until it can say so itself, Ctrl-C ends it without a word."""
    default = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if default:  # else a shell runs the command in the background, with Ctrl-C ignored
        signal.signal(signal.SIGINT, lambda number, frame: os._exit(INTERRUPTED))
    from esper.cli import main as run

    if default:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    run()


if __name__ == "__main__":
    main()
