"""Several graphs are lowered at a time, in processes of their own, to the same delegates."""

import os
import signal

import pytest

from server.compiler.export import lowering
from server.compiler.export.lowering import at_once
from shared.errors import CompileFailed, UnsupportedModel


@pytest.mark.parametrize("cores", [1, 2])
def test_what_a_function_raises_is_raised(monkeypatch, cores):
    monkeypatch.setattr(lowering, "cores", lambda: cores)

    def refuse():
        raise UnsupportedModel("no such layer")

    for functions in ([refuse, int], [int, refuse]):
        with pytest.raises(UnsupportedModel, match="no such layer"):
            at_once(functions)


def test_a_killed_child_is_a_failed_compilation(monkeypatch):
    monkeypatch.setattr(lowering, "cores", lambda: 2)
    with pytest.raises(CompileFailed, match="exit code -9"):
        at_once([lambda: os.kill(os.getpid(), signal.SIGKILL), lambda: None])


def test_a_child_has_no_children(monkeypatch):
    monkeypatch.setattr(lowering, "cores", lambda: 2)
    (inner, outer), here = at_once([lambda: (at_once([os.getpid, os.getpid]), os.getpid()), os.getpid])
    assert inner == [outer, outer]
    assert outer != here
