import subprocess
import sys
from pathlib import Path

CASES = Path(__file__).parents[1] / "channels_last_cases.py"


def test_every_seed_learns_in_a_channels_last_host_as_in_any_other() -> None:
    run = subprocess.run([sys.executable, CASES], capture_output=True, text=True, check=False)
    last = run.stdout.splitlines()[-1] if run.stdout else "the start"
    assert run.returncode == 0, f"ended with {run.returncode} in {last}\n{run.stderr}"
    assert last == "done"
