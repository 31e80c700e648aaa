"""A personal model that stays open while its adapter changes: before a question it takes what is newest on the shelf.

Where the program is the same, only B is loaded anew, by the program's own `load`; base weights stay where they are.
What is newest may have been trained here, pulled, or rolled back to, by any other process. Knows no network.
"""

from __future__ import annotations

from dataclasses import replace

from device_agent.adapters import AdapterShelf, OpenedAdapter
from device_agent.personal import PersonalModel, open_personal
from device_agent.state import Home
from shared.errors import MobizoError


class LiveModel:
    """`model` between two calls of `refresh`."""

    def __init__(self, home: Home, name: str, *, base: bool = False) -> None:
        """base: the base model without any adapter, so that there is nothing to take. Raises as `open_personal`."""
        self._home, self._base, self._shelf = home, base, AdapterShelf(home)
        self._newest = self._shelf.newest(name)
        self.model: PersonalModel = open_personal(home, name, base=base)

    def refresh(self) -> str | None:
        """Takes the adapter that is newest by now, if it is another; what happened, in words.

        One that cannot be used is passed over, and the one before stays in use. Raises RuntimeFailed if the program
        does not take the new B.
        """
        name = self.model.name
        newest = self._shelf.newest(name)
        if self._base or newest in (None, self._newest):
            return None
        self._newest = newest
        try:
            opened = self._shelf.open(name, *self._home.config().trusted_keys())
            fresh = None if self._runs(opened) else open_personal(self._home, name)
        except MobizoError as error:
            return f"{name}: a new version is here and cannot be used ({error.detail}); the one before stays in use"
        if fresh is None:
            self.model.inference.load(opened.flat)
            self.model = replace(self.model, task=opened.about.task, manifest=opened.manifest)
        else:
            self.close()
            self.model = fresh
        return f"{name}: now the adapter {opened.about.words}"

    def close(self) -> None:
        """Frees the program's memory."""
        self.model.close()

    def _runs(self, opened: OpenedAdapter) -> bool:
        """Whether the program that is loaded is the adapter's own."""
        here = self.model.manifest
        return (here.recipe_id, here.files) == (opened.manifest.recipe_id, opened.manifest.files)
