"""What this process holds; traces are tested with the command that makes them."""

import os

from esper.simic.telemetry.profiler import resident_mb


def test_memory_of_this_process_is_told_where_the_system_tells_it(tmp_path):
    (tmp_path / "statm").write_text("900 250 30 1 0 60 0\n")
    page = os.sysconf("SC_PAGE_SIZE")
    assert resident_mb(tmp_path / "statm") == 250 * page / 1e6
    assert resident_mb(tmp_path / "nothing") is None
