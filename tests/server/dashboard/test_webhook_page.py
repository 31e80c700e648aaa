"""The page of webhooks: their state, their messages, and the test."""

from sqlalchemy import update

from server.database.columns import utc_now
from server.webhooks.repository import Webhook
from shared.access import Role

PAGE = "/ui/operations/webhooks"


def test_a_webhook_is_tested_and_its_messages_and_failures_are_shown(home, person, app):
    body = {"url": "https://shop.example/hook", "events": ["job.failed"]}
    webhook = app.post("/v1/webhooks", json=body).json()["view"]["id"]
    someone = person(Role.APP)
    assert f'href="{PAGE}"' in someone.get("/ui/operations").text
    assert "No message so far." in someone.get(PAGE).text
    assert someone.act(f"{PAGE}/{webhook}/test", PAGE).status_code == 303
    assert "webhook.test" in someone.get(PAGE).text
    with home.database.writing() as session:
        session.execute(update(Webhook).values(failing_since=utc_now(), disabled_at=utc_now()))
    text = someone.get(PAGE).text
    assert "disabled" in text
    assert "Failing since" in text
    other = person(tenant="other")
    assert "shop.example" not in other.get(PAGE).text
    assert other.act(f"{PAGE}/{webhook}/test", PAGE).status_code == 404
