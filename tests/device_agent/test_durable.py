"""Temporary files of durable writes."""

import os

from device_agent.durable import LEFTOVER_SECONDS, remove_leftovers


def test_temporary_files_of_killed_processes_are_removed_and_those_in_use_are_not(tmp_path):
    old, recent = tmp_path / "runs" / ".run.json.abc.new", tmp_path / ".status.json.def.new"
    old.parent.mkdir()
    for path in (old, recent):
        path.touch()
    os.utime(old, (old.stat().st_mtime - LEFTOVER_SECONDS - 1,) * 2)
    remove_leftovers(tmp_path)
    assert (old.exists(), recent.exists()) == (False, True)
