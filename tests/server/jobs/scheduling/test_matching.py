"""What a job needs of a device, and what a device lacks; `test_queue` has labels, memory and operators over HTTP."""

import pytest
from pydantic import ValidationError

from server.jobs.scheduling.matching import DeviceOffer, Needs, can_run, lacks
from shared.capabilities import Capabilities, Requirements

GIB = 1 << 30


def offer(memory=None, **capability_values):
    capabilities = Capabilities(**capability_values) if capability_values else None
    return DeviceOffer("default", "device_1", frozenset({"alice"}), frozenset({"movies"}), memory, capabilities)


@pytest.mark.parametrize(
    ("needs", "sufficient", "insufficient"),
    [
        ({"total_bytes": 2 * GIB}, offer(total_bytes=2 * GIB), offer(total_bytes=2 * GIB - 1)),
        ({"backend": "xnnpack"}, offer(backends=("portable", "xnnpack")), offer(backends=("torch",))),
        ({"executorch": "1.5.1"}, offer(executorch="1.6.0"), offer(executorch="1.5.0")),
        ({"executorch_asked": ">=1.5,<2"}, offer(executorch="1.5.1+cpu"), offer(executorch="2.0.0")),
        ({"charging": True}, offer(charging=True), offer(charging=False)),
        (
            {"battery_floor": 40.0},
            offer(charging=False, battery_percent=40),
            offer(charging=False, battery_percent=39),
        ),
    ],
)
def test_each_need(needs, sufficient, insufficient):
    needs = Needs(**needs)
    assert can_run(needs, sufficient)
    assert len(list(lacks(needs, insufficient))) == 1


def test_a_device_that_says_nothing_has_what_every_agent_has_and_nothing_asked_for():
    old = offer(memory=1)
    assert can_run(
        Needs(backend="xnnpack", executorch="1.5.1", program_bytes=100, charging=True, battery_floor=50), old
    )
    for needs in (
        {"operator": "mobizo::noise"},
        {"total_bytes": 1},
        {"executorch_asked": ">=1"},
        {"labels": {"a": "b"}},
        {"cohort": "reviews"},
    ):
        assert not can_run(Needs(**needs), old)


def test_low_battery_does_not_matter_on_external_power():
    assert can_run(Needs(battery_floor=90), offer(charging=True, battery_percent=10))


@pytest.mark.parametrize("text", ["", "1.5", ">=x", ">=1.5 <2", "=>1"])
def test_conditions_that_are_none(text):
    with pytest.raises(ValidationError, match="executorch"):
        Requirements(executorch=text)


def test_a_version_that_is_none():
    with pytest.raises(ValidationError, match="executorch"):
        Capabilities(executorch="main")
    assert can_run(Needs(executorch="main"), offer(executorch="1.5.1"))  # a program made by a build without a version
