"""An adapter version is tried out on its page: it chooses an answer, or continues a prompt."""

import json
import re

import numpy as np
import pytest

from server.identity.quotas import Quota, QuotaService
from shared.access import Role
from shared.task_templates import named_task
from tests.server.dashboard.browsing import CHROMIUM, MISSING, Tab, chromium
from tests.server.dashboard.people import Person

AT = "/ui/adapters/red/versions/1"
TEXT = "a <b>fine</b> film"
ROW = re.compile(r'<th scope="row">(\w+) <span class="muted">([^<]*)</span></th>' + r'<td class="r">([\d.]+)%</td>' * 2)


@pytest.fixture
def person(site):
    with Person(site.fleet.url) as someone:
        assert someone.sign_in(site.fleet.home.token(Role.OPERATOR)).status_code == 303
        yield someone


def shares(site, adapter, task):
    prompt = task["prompt"].replace("{text}", TEXT)
    scores = np.array([site.expected("default", adapter, prompt, answer["text"]) for answer in task["answers"]])
    return np.exp(scores) / np.exp(scores).sum()


def test_a_version_chooses_among_its_task_s_answers_beside_its_base(site, person):
    task = named_task("sst2").model_dump(mode="json")
    page = person.act(f"{AT}/choose", AT, **{"field-text": TEXT})
    assert page.status_code == 200, page.text
    rows = ROW.findall(page.text)
    assert [(label, text) for label, text, *_ in rows] == [(a["labels"][0], a["text"]) for a in task["answers"]]
    page_shares = np.array([[float(base), float(version)] for *_, base, version in rows]) / 100
    assert np.allclose(page_shares[:, 0], shares(site, None, task), atol=1e-3)
    assert np.allclose(page_shares[:, 1], shares(site, "red", task), atol=1e-3)
    assert "a &lt;b&gt;fine&lt;/b&gt; film</textarea>" in page.text
    best = rows[int(page_shares[:, 1].argmax())][0]
    assert f"This version answers <strong>{best}</strong>" in page.text


def test_a_record_without_its_field_is_refused_and_a_long_one_kept(person):
    response = person.act(f"{AT}/choose", AT, other="x")
    assert response.status_code == 422
    assert "field &#39;text&#39; is missing" in response.text
    long = person.act(f"{AT}/choose", AT, **{"field-text": "word " * 3000})
    assert long.status_code == 422
    assert "word word" in long.text


@pytest.mark.slow
@pytest.mark.skipif(CHROMIUM is None, reason=MISSING)
def test_a_person_rates_texts_downloads_the_ratings_and_tries_the_next_version_in_a_browser(site):
    with site.fleet.home.database.writing() as session:
        QuotaService(session).set_limit("default", Quota.RATINGS, 10)
    with chromium() as browser:
        tab = Tab(browser, site.fleet.url)
        tab.sign_in(site.fleet.home.token(Role.OPERATOR), "/ui/adapters/new/versions/1")
        page, records = tab.page, []

        def generate(prompt):
            page.get_by_text("Or let it continue a prompt").click()
            page.get_by_label("Prompt").fill(prompt)
            page.get_by_label("Most tokens").fill("5")
            page.get_by_role("button", name="Generate").click()
            page.get_by_text("5 tokens; ended by").wait_for(timeout=120_000)  # the first one loads the base model
            return page.get_by_label("Generated text").text_content()

        for prompt, thumb in (("a film\na film", "Good text"), ("It was", "Bad text")):
            assert not page.get_by_role("button", name=thumb).is_visible()
            text = generate(prompt)
            page.get_by_role("button", name=thumb).click()
            page.get_by_text("The rating is stored").wait_for()
            records.append({"prompt": prompt, "completion": text, "label": thumb == "Good text"})
        page.get_by_text("Or let it continue a prompt").click()
        with page.expect_download() as download:
            page.get_by_role("link", name="Download the ratings of new").click()
        lines = download.value.path().read_text().splitlines()
        assert [json.loads(line) for line in lines] == records

        site.publish("default", "new", 60, tuned_accuracy=0.9)  # as a device trains it with these records
        tab.go("/ui/adapters/new")
        page.get_by_role("row", name="v2 main").get_by_role("link", name="v2").click()
        page.get_by_role("heading", name="new v2").wait_for()
        expected = site.tokenizer.decode(site.continued("default", "new", "It was", 5))
        assert generate("It was").split() == expected.split() != records[1]["completion"].split()
        page.get_by_role("textbox", name="Text").fill(TEXT)
        page.get_by_role("button", name="Choose an answer").click()
        page.get_by_text("This version answers").wait_for()
        assert page.get_by_role("textbox", name="Text").input_value() == TEXT
        assert tab.violations() == []
        assert tab.errors == []
        tab.close()
