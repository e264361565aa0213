"""`esper watch`: a run in the terminal. The text comes from watch_text."""

from pathlib import Path
from typing import Any, ClassVar

from textual.app import App, ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import VerticalScroll
from textual.screen import ModalScreen, Screen
from textual.widgets import ContentSwitcher, DataTable, Footer, Static

from esper.leyline import ConfigError
from esper.observatory import watch_text
from esper.observatory.describe import describe
from esper.observatory.runs import fingerprint, is_run, summarize_run

POLL = 0.5  # seconds between checks of the run


def watch(folder: Path) -> None:
    """Show a run in the terminal until the user presses q. Raises ConfigError if it is no run."""
    if not is_run(folder):
        raise ConfigError(f"{folder} is not a run")
    if summarize_run(folder).kind == "evaluation":
        raise ConfigError(f"{folder} is an evaluation; see it with esper show, report or serve")
    WatchApp(folder).run()


class Help(ModalScreen[None]):
    BINDINGS: ClassVar[list[BindingType]] = [("escape,question_mark,q", "dismiss", "Back")]
    CSS = "Help VerticalScroll { background: $surface; padding: 1 2; }"

    def compose(self) -> ComposeResult:
        with VerticalScroll():
            yield Static(watch_text.help_text(), id="help")
        yield Footer()


class WatchApp(App[None]):
    """`at` is the frame that is shown; None is the newest."""

    CSS = """
    #heading { height: 3; padding: 0 1; }
    ContentSwitcher { height: 1fr; }
    ContentSwitcher > * { padding: 0 1; }
    """
    ENABLE_COMMAND_PALETTE = False
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("space", "pause", "Pause", priority=True),
        Binding("left", "scrub(-1)", "Scrub", key_display="←→", priority=True),
        Binding("right", "scrub(1)", show=False, priority=True),
        Binding("home", "scrub(-1000000)", "First", show=False, priority=True),
        Binding("end", "follow", "Last", show=False, priority=True),
        Binding("n", "view('network')", "Net"),
        Binding("e", "view('environments')", "Envs"),
        Binding("p", "view('policy')", "Policy"),
        Binding("v", "view('events')", "Events"),
        Binding("question_mark", "help", "Help", key_display="?"),
        Binding("q", "quit", "Quit"),
    ]

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.title = "esper watch"
        self.folder = folder
        self.at: int | None = None
        self.env = 0
        self.round_: int | None = None
        self.paused = False
        self.data: dict[str, Any] = describe(folder)
        self.mark = fingerprint(folder)

    def compose(self) -> ComposeResult:
        yield Static(id="heading", markup=False)
        training = self.data["run"]["kind"] == "training"
        with ContentSwitcher(initial="environments" if training else "network"):
            yield Static(id="network", markup=False)
            yield DataTable(id="environments", cursor_type="row", zebra_stripes=False)
            for name in ("policy", "events"):
                with VerticalScroll(id=name):
                    yield Static(id=f"{name}-text", markup=False)
        yield Footer()

    def on_mount(self) -> None:
        table = self.page.query_one(DataTable)
        table.add_columns("env", "epoch", "score", "return", "params", "stages")
        self.set_interval(POLL, self.poll)
        self.show()
        if self.data["run"]["kind"] == "training":
            table.focus()

    def on_resize(self) -> None:
        self.call_after_refresh(self.show)

    @property
    def page(self) -> Screen[None]:
        """The screen with the run, also while the help covers it."""
        return self.screen_stack[0]

    def poll(self) -> None:
        """Read the run again if it has changed, unless paused."""
        if not self.paused and fingerprint(self.folder) != self.mark:
            self.read()

    def read(self) -> None:
        self.mark = fingerprint(self.folder)
        if is_run(self.folder):
            self.data = describe(self.folder, round_=self.round_, env=self.env)
        else:
            why = "the folder of the run is gone; this is its last state"
            self.data["run"] |= {"state": "broken", "why": why}
        self.show()

    @property
    def frame(self) -> int:
        last = max(0, len(self.data["episode"]["frames"]) - 1)
        return last if self.at is None else min(self.at, last)

    def show(self) -> None:
        width, height = max(20, self.size.width - 2), self.size.height - 4
        heading = watch_text.heading(self.data, width, self.paused)
        self.page.query_one("#heading", Static).update(heading)
        network = watch_text.network(self.data, self.frame, width, height)
        self.page.query_one("#network", Static).update(network)
        self.page.query_one("#policy-text", Static).update(watch_text.policy(self.data, width))
        self.page.query_one("#events-text", Static).update(watch_text.events(self.data))
        table = self.page.query_one(DataTable)
        row = table.cursor_row
        table.clear()
        for environment in self.data["environments"]:
            table.add_row(*watch_text.environment_row(environment))
        table.move_cursor(row=row)

    # --- keys ------------------------------------------------------------------------------------

    def action_pause(self) -> None:
        """Stay at this epoch of a live run, or follow it."""
        self.paused = not self.paused
        self.at = self.frame if self.paused else None
        self.show()

    def action_scrub(self, epochs: int) -> None:
        """Move through the epochs of a network, or through the rounds where these are shown."""
        if self.view in ("environments", "policy") and self.data.get("last_round") is not None:
            self.move_rounds(epochs)
            return
        last = len(self.data["episode"]["frames"]) - 1
        to = max(0, self.frame + epochs)
        self.at = None if to >= last else to
        self.show()

    def move_rounds(self, rounds: int) -> None:
        last = self.data["last_round"]
        to = max(0, (last if self.round_ is None else self.round_) + rounds)
        self.round_ = None if to >= last else to
        self.read()

    def action_follow(self) -> None:
        self.at = self.round_ = None
        self.paused = False
        self.read()

    @property
    def view(self) -> str:
        return str(self.page.query_one(ContentSwitcher).current)

    def action_view(self, name: str) -> None:
        self.page.query_one(ContentSwitcher).current = name
        if name == "environments":
            self.page.query_one(DataTable).focus()

    def action_help(self) -> None:
        self.push_screen(Help())

    def on_data_table_row_selected(self, event: DataTable.RowSelected) -> None:
        self.env = self.data["environments"][event.cursor_row]["env"]
        self.at = None
        self.read()
        self.action_view("network")
