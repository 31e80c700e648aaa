"""People at the pages, without JavaScript."""

import re

import httpx

from tests.server.actors import TLS

FIELD = re.compile(r'name="csrf" value="([0-9a-f]+)"')


class Person(httpx.Client):
    """A browser without JavaScript: it keeps cookies and sends forms, each with the CSRF token of a page."""

    def __init__(self, url):
        super().__init__(base_url=url, timeout=60, verify=TLS)

    def sign_in(self, token, target="/"):
        """The answer to the login form."""
        page = self.get("/ui/login", params={"next": target})
        return self.send_form("/ui/login", page, token=token, next=target)

    def send_form(self, path, page, **fields):
        """Posts a form that is on `page`, the answer that holds it."""
        (token, *_) = FIELD.findall(page.text)
        origin = {"Referer": str(page.url)}
        return self.post(path, data={"csrf": token, **fields}, headers=origin)

    def act(self, path, on="/", **fields):
        """Posts a form from the page at `on`."""
        return self.send_form(path, self.get(on), **fields)
