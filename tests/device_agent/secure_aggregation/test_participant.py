"""What a device keeps of a masked round and of other devices, and what it lets itself be told."""

import stat

import pytest

from device_agent.secure_aggregation.participant import trust_keys
from shared.errors import LeftOutOfRound, Untrusted
from tests.shared.federation.secure_aggregation.devices import Round


@pytest.mark.parametrize("text", ["", "{", '{"member": "device-1"}'])
def test_a_damaged_file_is_the_end_of_this_devices_part(text):
    masked = Round(3)
    device = masked.devices["device-001"]
    device.state_file.write_text(text)
    with pytest.raises(LeftOutOfRound, match="damaged"):
        device.restart()


def test_parameters_that_change_on_the_way_end_this_devices_part():
    masked = Round(3)
    masked.run_turn()
    device = masked.devices["device-001"]
    masked.server.parameters = masked.server.parameters.model_copy(update={"minimum": 4})
    device.restart()
    with pytest.raises(Untrusted, match="parameters"):
        device.participant.advance()
    assert device.stored_state() is None


def test_a_peer_is_known_by_the_key_that_it_first_had(tmp_path):
    path = tmp_path / "peers.json"
    trust_keys(path, {"device-1": bytes([1]) * 32, "device-2": bytes([2]) * 32})
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    trust_keys(path, {"device-2": bytes([2]) * 32, "device-3": bytes([3]) * 32})
    before = path.read_bytes()
    with pytest.raises(Untrusted, match="another key for device device-1"):
        trust_keys(path, {"device-4": bytes([4]) * 32, "device-1": bytes([9]) * 32})
    assert path.read_bytes() == before, "nobody of a roster that is refused is noted"


def test_a_damaged_book_lets_nobody_in(tmp_path):
    (tmp_path / "peers.json").write_text("[]")
    with pytest.raises(Untrusted, match="cannot be read"):
        trust_keys(tmp_path / "peers.json", {"device-1": bytes(32)})
