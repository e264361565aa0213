"""Make the policy that ships: record episodes, learn from them offline, export it with its card.

    python benchmarks/claims/shipped.py --runs runs --out policies

Six recordings of `each`, with every candidate of a host side by side and one host left alone, and
one policy from all of them. A recording that is there is not made again. The card says what was
done; the figures of claim H are added by `--measured`, from the rows of the claim:

    python benchmarks/claims/shipped.py --runs runs --out policies --measured
"""

from pathlib import Path

from esper.api import export_policy, learn_offline, record
from esper.simic.recordings.episodes import FILE

NAME, FAMILY = "digits-trained", "digits:trained"
KEYS, EPISODES, GROUP = range(6), 1_280, 10


def recordings(runs: Path) -> list[Path]:
    """The folders of the recordings; those that are missing are recorded now."""
    folders = [runs / f"each-{key}" for key in KEYS]
    for key, folder in zip(KEYS, folders, strict=True):
        if not (folder / FILE).is_file():
            record(
                "each",
                out=folder,
                family=FAMILY,
                group=GROUP,
                episodes=EPISODES,
                key=key,
                overwrite=folder.exists(),
            )
            print(folder, flush=True)
    return folders


def learned(runs: Path, out: Path) -> Path:
    """The folder of the exported policy; it is learned and exported if it is missing."""
    folder, run = out / NAME, runs / "shipped"
    if not folder.exists():
        sources = recordings(runs)
        learn_offline(sources, out=run, family=FAMILY, advantage="group", overwrite=run.exists())
        export_policy(run, NAME, out)
    return folder
