"""Start of the `esper` command, which Ctrl-C ends at any moment without a traceback."""

import os
import signal
from types import FrameType

INTERRUPTED = 130  # what a shell expects of a command that Ctrl-C has ended


def main() -> None:
    """Run the command. While its modules load, Ctrl-C ends it without output. SIGTERM has the same
    effect as Ctrl-C."""
    default = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if default:  # else a shell runs the command in the background, with Ctrl-C ignored
        signal.signal(signal.SIGINT, lambda number, frame: os._exit(INTERRUPTED))
    from esper.cli import main as run

    if default:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    own = os.getpid()

    def stop(number: int, frame: FrameType | None) -> None:
        """What Ctrl-C does at this moment; processes that were forked end at once."""
        if os.getpid() != own:
            os._exit(128 + number)
        handler = signal.getsignal(signal.SIGINT)
        (handler if callable(handler) else signal.default_int_handler)(signal.SIGINT, frame)

    if signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
        signal.signal(signal.SIGTERM, stop)
    run()


if __name__ == "__main__":
    main()
