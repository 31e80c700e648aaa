"""Marks as slow the tests of measurements that compile, train or start servers."""

import pytest

SLOW = (
    "test_server_load",
    "test_smoke",
    "test_steps",
)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    for item in items:
        if item.path.parent.name == "bench" and item.path.stem in SLOW:
            item.add_marker(pytest.mark.slow)
