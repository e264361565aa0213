"""The documentation site builds without warnings, loads nothing from elsewhere, and its links are
valid."""

import inspect
import logging
import re
from dataclasses import dataclass, field
from html import unescape
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urldefrag

import pytest
from mkdocs.commands.build import build
from mkdocs.config import load_config

import esper
from browser_support import browser_page, needs_browser
from document_support import ROOT
from reference_text import comment_above, markdown
from site_pages import page_of, relinked

pytestmark = pytest.mark.heavy
# Attributes by which a page makes a browser fetch something at once.
FETCHED = {"src", "srcset", "poster", "data"}


@dataclass
class PageContent(HTMLParser):
    """Ids, links and loaded files of a page."""

    ids: set[str] = field(default_factory=set)
    links: list[str] = field(default_factory=list)
    fetched: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        super().__init__()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        for name, value in attrs:
            if name in ("id", "name") and value:
                self.ids.add(value)
            elif name == "href" and tag == "a" and value:
                self.links.append(value)
            elif (name in FETCHED or (name == "href" and tag == "link")) and value:
                self.fetched.append(value)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    config = load_config(str(ROOT / "mkdocs.yml"), site_dir=str(folder))
    assert config.strict
    build(config)
    logging.getLogger("mkdocs").handlers.clear()
    return folder


@pytest.fixture(scope="module")
def pages(site: Path) -> dict[Path, PageContent]:
    found = {}
    for path in site.rglob("*.html"):
        found[path] = PageContent()
        found[path].feed(path.read_text())
    return found


def is_outside(target: str) -> bool:
    return target.startswith("//") or (":" in target and not target.startswith("data:"))


def test_it_has_a_page_for_everything(site: Path) -> None:
    documents = [p.relative_to(ROOT / "docs") for p in (ROOT / "docs").rglob("*.md")]
    examples = [Path("examples") / p.name for p in (ROOT / "examples").glob("*.py")]
    notebooks = [Path("notebooks") / p.name for p in (ROOT / "docs/notebooks").glob("*.ipynb")]
    made = [Path("project/contributing"), Path("project/changelog"), Path("decisions/index")]
    for page in [*documents, *examples, *notebooks, *made]:
        assert (site / page.with_suffix(".html")).exists(), page
    assert not list(site.rglob("*.py"))


def test_nothing_is_fetched_from_elsewhere(site: Path, pages: dict[Path, PageContent]) -> None:
    for path, page in pages.items():
        assert not [target for target in page.fetched if is_outside(target)], path
        assert "mermaid" not in path.read_text()  # the theme would fetch a script for it
    for path in site.rglob("*.css"):
        assert not re.search(r"@import|url\([\"']?(https?:)?//", path.read_text()), path


def test_no_link_is_dead(pages: dict[Path, PageContent]) -> None:
    links = 0
    for path, page in pages.items():
        if path.name == "404.html":
            continue  # served for any address: its links begin at the root
        for link in [*page.links, *page.fetched]:
            if is_outside(link) or link.startswith("data:"):
                continue
            target, anchor = urldefrag(unquote(link))
            found = (path.parent / target).resolve() if target else path
            assert found.is_file(), f"{path.name}: {link}"
            if anchor and found in pages:
                assert anchor in pages[found].ids, f"{path.name}: {link}"
            links += 1
    assert links > 1000


@pytest.mark.parametrize("name", esper.__all__)
def test_every_public_name_has_its_entry(name: str, site: Path) -> None:
    text = (site / "reference" / "esper.html").read_text()
    _, _, after = text.partition(f'<h3 id="esper.{name}"')
    assert after, f"esper.{name} has no entry"
    entry = re.split(r"<h[23] id=", after)[0]
    texts = re.findall(r"<p>(.+?)</p>", entry, flags=re.DOTALL)
    assert texts, f"esper.{name} has no docstring"
    if name != "__version__":
        # The page is made from the source, and must equal the docstring at run time.
        docstring = inspect.getdoc(getattr(esper, name))
        first = re.sub(r"\W+", " ", docstring.split("\n\n")[0])
        shown = unescape(re.sub(r"<[^>]+>", "", texts[0]))
        assert re.sub(r"\W+", " ", shown).split() == first.split()


def test_links_to_files_become_links_to_pages() -> None:
    assert page_of("examples/track.py") == "examples/track.md"
    assert page_of("src/esper/__init__.py") is None
    text = "[a](../examples/track.py) [b](data.md#x) [c](notebooks/own-model.ipynb) [d](#here)"
    assert relinked(text, "integrations.md") == (
        "[a](examples/track.md) [b](data.md#x) [c](notebooks/own-model.md) [d](#here)"
    )
    assert relinked("[a](docs/data.md)", "project/changelog.md") == "[a](../data.md)"
    assert relinked("[a](../src/x.py)", "data.md") == "[a](../src/x.py)"  # the build refuses it
    code = "```python\nx[0](a.py)\n```"
    assert relinked(code, "command-line.md") == code


def test_columns_of_docstrings_become_lists() -> None:
    text = "First.\n\nname  what it is,\n      and more\nother  too\n\nLast  line.\n  no"
    assert markdown(text) == (
        "First.\n\n- `name`: what it is, and more\n- `other`: too\n\n- `Last`: line. no"
    )
    assert comment_above(["# far", "", "    # near,", "    # by", "    x: int"], 5) == "near, by"
    assert markdown("One sentence.  Another.\nand on") == "One sentence.  Another.\nand on"


@needs_browser
def test_it_works_from_a_folder_and_search_finds_messages(site: Path) -> None:
    with browser_page(viewport={"width": 390, "height": 844}) as (page, noise):
        for name in ("notebooks/own-model", "reference/esper", "claims", "index"):
            page.goto(f"file://{site}/{name}.html")
            wide = page.evaluate("document.documentElement.scrollWidth")
            assert wide <= 390, name
        page.locator("label[for=__search]").first.click()
        page.locator("input.md-search__input").press_sequentially("matches no slot")
        page.locator(".md-search-result__item a[href*=troubleshooting]").first.wait_for()
    assert not noise.errors
    assert not noise.foreign("file:")
