"""Thumbs on the page that tries a version: who may give them, who gets them, and when they go."""

import json
from datetime import timedelta

from server.identity.quotas import Quota, QuotaService
from server.registry.purge import purge_adapters
from server.registry.ratings import RatingService
from shared.access import Role, Scope


def test_texts_are_rated_only_if_an_administrator_allows_it_and_the_ratings_are_downloaded(
    fleet, home, person, device, lease
):
    device.finish(lease)
    someone, at = person(Role.APP), "/ui/adapters/alice-movies/versions/1"
    fields = {"prompt": "two\r\nlines", "completion": " and a text", "rating": "up"}
    assert "data-rate" not in someone.get(at).text
    assert someone.act(f"{at}/rate", at, **fields).status_code == 409
    with home.database.writing() as session:
        QuotaService(session).set_limit("default", Quota.RATINGS, 2)
    assert "data-rate" in someone.get(at).text
    assert someone.act(f"{at}/rate", at, **fields | {"rating": "often"}).status_code == 400
    for rating, status in (("up", 303), ("down", 303), ("up", 409)):
        assert someone.act(f"{at}/rate", at, **fields | {"rating": rating}).status_code == status
    reader = person(scopes=frozenset({Scope.ADAPTERS_READ, Scope.ADAPTERS_SCORE}))
    assert reader.get("/ui/adapters/alice-movies/ratings").status_code == 403
    answer = person(Role.OPERATOR).get("/ui/adapters/alice-movies/ratings")
    assert answer.headers["content-disposition"] == 'attachment; filename="alice-movies-ratings.jsonl"'
    record = {"prompt": "two\nlines", "completion": " and a text"}
    assert [json.loads(line) for line in answer.text.splitlines()] == [
        record | {"label": True},
        record | {"label": False},
    ]
    assert fleet.operator().delete("/v1/adapters/alice-movies").status_code == 200
    assert purge_adapters(home.database, timedelta(0)) == 1
    with home.database.reading() as session:
        assert RatingService(session).count("default") == 0
