"""Do runs of every kind still write what they wrote before?

    python benchmarks/golden.py              compare with benchmarks/results/golden.json
    python benchmarks/golden.py --record     record new values

Plays one short run of each kind with fixed keys and hashes what it writes: rows of metrics, events,
outcomes and summaries, scripts of actions, weights of grown networks and policies. Times and
settings are left out. For changes that must not change results; rounding differs between machines,
so record and compare on the same one. The last line is one JSON object: files compared, and the
names of those that differ.
"""

import argparse
import hashlib
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import nn

GOLDEN = Path(__file__).parent / "results" / "golden.json"
ROWS = ("metrics.jsonl", "events.jsonl", "outcomes.jsonl", "runs.jsonl", "summary.json")
TIMES = {"cpu_seconds", "seconds", "time", "began", "at"}

GROW = "grow --task digits --steps 8 --no-compare"
PPO = "train ppo --rounds 2 --steps 8"
COMMANDS = {
    "grow-heuristic": f"{GROW} --steps 20 --key 2",
    "grow-compared": "grow --task digits --steps 12 --key 1",
    "grow-random": f"{GROW} --controller random --steps 16",
    "grow-scripted": f"{GROW} --controller scripted:early --steps 16",
    "grow-trained": "grow --task digits --start trained --extra 0.5 --steps 20",
    "grow-policy": f"{GROW} --controller pretrained",
    "ppo-looped": f"{PPO} --task digits --envs 2 --population looped",
    "ppo-fused": f"{PPO} --task digits --envs 4 --population fused --network set",
    "ppo-family": "train ppo --rounds 2 --family digits:mixed --envs 4 --group 2",
    "evaluate": "evaluate --task digits --arms static,heuristic --keys 2 --steps 8",
    "evaluate-trained": (
        "evaluate --task digits --scenario trained --extra 0.5 --arms heuristic --keys 1 --steps 12"
    ),
    "record": "train record --task digits --controller random --episodes 8 --steps 8",
    "offline": "train offline --episodes {folder}/record --task digits",
}


def run_command(words: str, folder: Path, name: str) -> None:
    out = folder / name
    command = [sys.executable, "-m", "esper", *words.format(folder=folder).split()]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [*command, "--out", str(out)], env=environment, capture_output=True, text=True
    )
    if done.returncode != 0:
        raise RuntimeError(f"esper {words}: {done.stderr[-2000:]}")


def small_model() -> tuple[nn.Module, list[Any], list[Any]]:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 3)
    )
    x, y = torch.randn(256, 8), torch.randint(0, 3, (256,))
    batches = list(zip(x.split(32), y.split(32), strict=True))
    return model, batches[:6], batches[6:]


def run_api(folder: Path) -> None:
    import esper

    model, train, val = small_model()
    esper.grow(
        model,
        train,
        val,
        slots=["0", "2"],
        steps=12,
        out=folder / "api",
        settings=esper.GrowthSettings(progress=False),
    )
    model, train, val = small_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def accuracy() -> float:
        with torch.no_grad():
            right = [(model(x).argmax(1) == y).float() for x, y in val]
        return 100.0 * torch.cat(right).mean().item()

    body = esper.attach(
        model,
        slots=["0", "2"],
        example=train[0][0],
        evaluate=accuracy,
        steps=12,
        controller="random",
    )
    body.manage(optimizer)
    for _ in range(12):
        for x, y in train:
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
        body.step(accuracy())
    body.finish()
    (folder / "attach").mkdir()
    (folder / "attach" / "metrics.jsonl").write_text("\n".join(map(json.dumps, body.history)))


def fingerprint(folder: Path) -> dict[str, str]:
    found = {}
    for path in sorted(folder.rglob("*")):
        name = str(path.relative_to(folder))
        if "checkpoints" in path.parts:
            continue
        if path.name in ROWS:
            rows = [_untimed(json.loads(line)) for line in _lines(path)]
            found[name] = _hash(json.dumps(rows, sort_keys=True).encode())
        elif path.name == "actions.txt":
            found[name] = _hash(path.read_bytes())
        elif path.suffix == ".safetensors":
            tensors = load_file(path)
            parts = [
                k.encode() + tensors[k].contiguous().numpy().tobytes() for k in sorted(tensors)
            ]
            found[name] = _hash(b"".join(parts))
    return found


def _lines(path: Path) -> list[str]:
    text = path.read_text()
    return [text] if path.suffix == ".json" else text.splitlines()


def _untimed(value: Any) -> Any:
    if isinstance(value, dict):
        return {k: _untimed(v) for k, v in value.items() if k not in TIMES}
    return [_untimed(v) for v in value] if isinstance(value, list) else value


def _hash(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:16]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--record", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for label, words in COMMANDS.items():
            run_command(words, folder, label)
            print(label, flush=True)
        run_api(folder)
        now = fingerprint(folder)
    if options.record:
        GOLDEN.write_text(json.dumps(now, indent=1) + "\n")
        print(json.dumps({"recorded": len(now)}))
        return
    before = json.loads(GOLDEN.read_text())
    different = sorted(name for name in {**before, **now} if before.get(name) != now.get(name))
    print(json.dumps({"compared": len(before), "different": different}))
    sys.exit(1 if different else 0)


if __name__ == "__main__":
    main()
