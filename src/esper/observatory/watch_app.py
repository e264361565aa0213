"""`esper watch`: a run in the terminal, live or played again. What is written is in watch_text."""

from pathlib import Path
from typing import Any, ClassVar

from textual.app import App, ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import VerticalScroll
from textual.screen import ModalScreen, Screen
from textual.widgets import ContentSwitcher, DataTable, Footer, Static

from esper.observatory import watch_text
from esper.observatory.described import describe
from esper.observatory.runs import is_run, stamp
from esper.observatory.story import TOPICS

LOOK = 0.5  # seconds between looks at the run
FRAME = 0.25  # seconds that an epoch lasts when it is played again


class Explanation(ModalScreen[None]):
    BINDINGS: ClassVar[list[BindingType]] = [("escape,question_mark,q", "dismiss", "Back")]
    CSS = "Explanation VerticalScroll { background: $surface; padding: 1 2; }"

    def compose(self) -> ComposeResult:
        with VerticalScroll():
            yield Static(watch_text.explanation(), id="explanation")
        yield Footer()


class WatchApp(App[None]):
    """`at` is the frame that is shown; None follows the newest."""

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
        Binding("f", "filter", "Filter", show=False),
        Binding("question_mark", "explain", "Help", key_display="?"),
        Binding("q", "quit", "Quit"),
    ]

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.title = "esper watch"
        self.folder = folder
        self.at: int | None = None
        self.env = 0
        self.round_: int | None = None
        self.paused = self.playing = False
        self.topic: str | None = None
        self.told: dict[str, Any] = describe(folder)
        self.seen = stamp(folder)

    def compose(self) -> ComposeResult:
        yield Static(id="heading", markup=False)
        training = self.told["line"]["kind"] == "training"
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
        self.set_interval(LOOK, self.look)
        self.set_interval(FRAME, self.play_on)
        self.show()
        if self.told["line"]["kind"] == "training":
            table.focus()

    def on_resize(self) -> None:
        self.call_after_refresh(self.show)

    @property
    def page(self) -> Screen[None]:
        """The screen with the run, also while the explanation lies over it."""
        return self.screen_stack[0]

    def look(self) -> None:
        """Read the run anew if it has changed and nobody has paused."""
        if self.paused or stamp(self.folder) == self.seen:
            return
        self.read()

    def read(self) -> None:
        self.seen = stamp(self.folder)
        if is_run(self.folder):
            self.told = describe(self.folder, round_=self.round_, env=self.env)
        else:
            gone = "the folder of the run has gone; this is what it last was"
            self.told["line"] |= {"state": "broken", "why": gone}
        self.show()

    def play_on(self) -> None:
        if self.playing:
            self.action_scrub(1)
            self.playing = self.at is not None

    @property
    def frame(self) -> int:
        last = max(0, len(self.told["episode"]["frames"]) - 1)
        return last if self.at is None else min(self.at, last)

    def show(self) -> None:
        width, height = max(20, self.size.width - 2), self.size.height - 4
        stopped = self.paused and not self.playing
        heading = watch_text.heading(self.told, width, stopped)
        self.page.query_one("#heading", Static).update(heading)
        network = watch_text.network(self.told, self.frame, width, height)
        self.page.query_one("#network", Static).update(network)
        self.page.query_one("#policy-text", Static).update(watch_text.policy(self.told, width))
        self.page.query_one("#events-text", Static).update(watch_text.events(self.told, self.topic))
        table = self.page.query_one(DataTable)
        row = table.cursor_row
        table.clear()
        for environment in self.told["environments"]:
            table.add_row(*watch_text.environment_row(environment))
        table.move_cursor(row=row)

    # --- keys ------------------------------------------------------------------------------------

    def action_pause(self) -> None:
        """A run that goes on stops to be followed; one that has ended is played again."""
        if self.told["line"]["state"] == "running":
            self.paused = not self.paused
            self.at = self.frame if self.paused else None
        else:
            self.playing = not self.playing
            if self.playing and self.at is None:
                self.at = 0
        self.show()

    def action_scrub(self, epochs: int) -> None:
        """Through the epochs of a network; through the rounds where they are shown."""
        if self.view in ("environments", "policy") and self.told.get("last_round") is not None:
            self.turn_rounds(epochs)
            return
        last = len(self.told["episode"]["frames"]) - 1
        to = max(0, self.frame + epochs)
        self.at = None if to >= last else to
        self.show()

    def turn_rounds(self, rounds: int) -> None:
        last = self.told["last_round"]
        to = max(0, (last if self.round_ is None else self.round_) + rounds)
        self.round_ = None if to >= last else to
        self.read()

    def action_follow(self) -> None:
        self.at = self.round_ = None
        self.paused = self.playing = False
        self.read()

    @property
    def view(self) -> str:
        return str(self.page.query_one(ContentSwitcher).current)

    def action_view(self, name: str) -> None:
        self.page.query_one(ContentSwitcher).current = name
        if name == "environments":
            self.page.query_one(DataTable).focus()

    def action_filter(self) -> None:
        topics = [None, *TOPICS]
        self.topic = topics[(topics.index(self.topic) + 1) % len(topics)]
        self.action_view("events")
        self.show()

    def action_explain(self) -> None:
        self.push_screen(Explanation())

    def on_data_table_row_selected(self, event: DataTable.RowSelected) -> None:
        self.env = self.told["environments"][event.cursor_row]["env"]
        self.at = None
        self.read()
        self.action_view("network")
