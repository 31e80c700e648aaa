"""Programs that are not what they should be: old, unsigned, with paths for names, or of another recipe."""

import pytest

from device_agent.jobs.leased_job import Outcome
from shared.canonical import sha256_hex
from shared.errors import Gone, MobizoError
from shared.program import ProgramFile
from shared.signing import new_private_key


def with_file(program, role, **changes):
    files = [
        ProgramFile.model_construct(**(file.model_dump() | changes)) if file.role == role else file
        for file in program.manifest.files
    ]
    return program.manifest.model_copy(update={"files": tuple(files)})


def test_an_older_program_than_one_seen_is_refused(daemon, server, rademacher):
    newer = rademacher.manifest.model_copy(update={"version": 2})
    server.add_job(rademacher, job_id="job-new", manifest=newer, steps=1)
    assert daemon.run(once=True).outcome is Outcome.COMPLETED
    calls = len(server.calls)
    server.add_job(rademacher, job_id="job-old", steps=1)
    job_end = daemon.run(once=True)
    assert job_end.outcome is Outcome.FAILED
    (failure,) = server.failures
    assert failure.code == "untrusted"
    assert "version 1" in failure.detail
    assert "has seen version 2" in failure.detail
    assert "enroll this device again" in failure.detail
    assert "files" not in [action for _, action in server.calls[calls:]]


def test_a_manifest_that_another_server_signed_is_refused(daemon, server, rademacher):
    server.add_job(rademacher, key=new_private_key(), steps=1)
    job_end = daemon.run(once=True)
    assert job_end.outcome is Outcome.FAILED
    assert "signature" in job_end.detail
    assert server.failures[0].code == "untrusted"
    assert server.served["downloads"] == 0


def test_a_manifest_that_names_a_path_is_refused(daemon, server, rademacher):
    """As any response that is not valid; tests/shared/test_program.py has the names that are none."""
    server.add_job(rademacher, manifest=with_file(rademacher, "program", name="../../evil"), steps=1)
    with pytest.raises(MobizoError, match="response is not a Lease"):
        daemon.run(once=True)
    assert server.served["downloads"] == 0


@pytest.mark.parametrize("role", ["weights", "program"])
def test_a_file_with_the_right_hash_that_is_no_such_file_fails_the_job(daemon, server, rademacher, role):
    content = bytes(range(256)) * 64
    manifest = with_file(rademacher, role, sha256=sha256_hex(content), size=len(content))
    server.add_job(rademacher, manifest=manifest, steps=1)
    server.files[sha256_hex(content)] = content
    job_end = daemon.run(once=True)
    assert job_end.outcome is Outcome.FAILED
    (failure,) = server.failures
    assert failure.code == "runtime-failed"
    assert "\n" not in failure.detail
    assert not server.uploads


@pytest.mark.slow
def test_a_run_of_another_recipe_is_not_handed_in(daemon, server, rademacher, gaussian, home):
    """A job that returns with a smaller recipe does not accept what was trained with the former one."""
    server.add_job(rademacher, steps=3)
    server.broken["adapter"] = [Gone()]
    assert daemon.run(once=True).outcome is Outcome.LOST
    former = home.run("job-1").best.read_bytes()
    server.jobs.clear()
    server.add_job(gaussian, steps=3)
    assert daemon.run(once=True).outcome is Outcome.COMPLETED
    assert server.uploads == [home.run("job-1").best.read_bytes()]
    assert server.uploads != [former]
    assert home.run("job-1").plan().manifest.recipe_id == gaussian.manifest.recipe_id
