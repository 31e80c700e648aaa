"""Temporary files of durable writes."""

import os

from device_agent.durable import LEFTOVER_SECONDS, remove_leftovers


def names(directory):
    return sorted(path.name for path in directory.iterdir())


def test_temporary_files_of_killed_processes_are_removed_and_those_in_use_are_not(tmp_path):
    old, recent = tmp_path / "runs" / ".run.json.abc.new", tmp_path / ".status.json.def.new"
    old.parent.mkdir()
    for path in (old, recent):
        path.touch()
    os.utime(old, (old.stat().st_mtime - LEFTOVER_SECONDS - 1,) * 2)
    remove_leftovers(tmp_path)
    assert names(tmp_path) == [".status.json.def.new", "runs"]
    assert names(old.parent) == []
