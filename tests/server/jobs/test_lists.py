"""The list of jobs: newest first, page by page, of one state, user or adapter."""

import itertools
import json

import pytest

from server.jobs.repository import Job
from shared.job import JobState

STATES = ("queued", "ready", "training", "succeeded", "failed", "cancelled")
USERS = {"alice": ("alice-films", "alice-books"), "bob": ("bob-films",)}


@pytest.fixture
def jobs(home, app):
    """Jobs in every one of these states for each adapter, by id; newest last."""
    facts_by_job = {}
    for state in STATES:
        for user, adapters in USERS.items():
            for adapter in adapters:
                job = app.submit(user=user, adapter=adapter)
                facts_by_job[job["id"]] = (state, user, adapter)
    for job_id, (state, _, _) in facts_by_job.items():
        home.change(Job, Job.id == job_id, state=JobState(state))
    return facts_by_job


def list_jobs(app, **params):
    """Ids of the whole list, by pages of two."""
    ids, cursor = [], None
    while True:
        page = app.get("/v1/jobs", params=params | {"limit": 2} | ({"cursor": cursor} if cursor else {})).json()
        ids += [job["id"] for job in page["items"]]
        cursor = page["next"]
        if cursor is None:
            return ids


@pytest.mark.both_databases
def test_every_choice_lists_exactly_what_was_chosen_newest_first(app, jobs):
    adapters = [adapter for owned in USERS.values() for adapter in owned]
    for state, user, adapter in itertools.product((None, "queued", "failed"), (None, *USERS), (None, *adapters)):
        filters = (state, user, adapter)
        expected = [
            job_id
            for job_id, facts in reversed(jobs.items())
            if all(choice in (None, fact) for choice, fact in zip(filters, facts, strict=True))
        ]
        params = {name: value for name, value in zip(("state", "user", "adapter"), filters, strict=True) if value}
        assert list_jobs(app, **params) == expected, params


def test_a_list_has_no_bodies_of_tasks_recipes_and_results(app):
    task = {"name": "long", "prompt": "{text} " + "x" * 7_000, "answers": []}
    task["answers"] = [{"text": f" {word}", "labels": [word]} for word in ("yes", "no")]
    job = app.submit(task=task, recipe={"sequence_length": 32})
    assert app.get(f"/v1/jobs/{job['id']}").json()["task"]["prompt"] == task["prompt"]
    (item,) = app.get("/v1/jobs").json()["items"]
    assert (item["id"], item["task"], item["base"], item["recipe_id"]) == (job["id"], "long", "tiny", job["recipe_id"])
    assert len(json.dumps(item)) < 1_000
