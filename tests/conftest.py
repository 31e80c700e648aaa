"""What all tests share: how long a case takes is nothing that they judge, and what was compiled serves them all."""

import pytest
from hypothesis import settings

from tests.programs import ProgramStore, run_directory

settings.register_profile("patient", deadline=None)
settings.load_profile("patient")


@pytest.fixture(scope="session")
def program_store(tmp_path_factory):
    """Programs of this run, compiled once for all workers."""
    return ProgramStore(run_directory(tmp_path_factory) / "compiled")
