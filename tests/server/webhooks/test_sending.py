"""Where messages may be sent: addresses in every form, names, redirects, TLS, and receivers that never answer."""

import contextlib
import socket
import threading

import pytest

from server.webhooks import sending
from server.webhooks.sending import WebhookAddressRefused, check_url, resolve, send
from tests.certificate import loopback_certificate
from tests.server.webhooks.receiver import receiving

SECRET = "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw"
LOOPBACK = "127.0.0.0/8"
PRIVATE = (
    *("127.0.0.1", "127.1", "2130706433", "0x7f000001", "0177.0.0.1", "localhost", "a.localhost", "0.0.0.0"),
    *("10.1.2.3", "172.16.0.1", "192.168.0.1", "100.64.0.1", "198.18.0.1", "224.0.0.1", "255.255.255.255"),
    *("169.254.169.254", "[fd00:ec2::254]"),  # metadata of clouds
    *("[::1]", "[::]", "[fe80::1]", "[fc00::1]", "[ff02::1]", "[2001:db8::1]"),
    *("[::ffff:127.0.0.1]", "[::ffff:10.0.0.1]", "[::127.0.0.1]", "[64:ff9b::a00:1]", "[2002:a00:1::]"),
)


def names(monkeypatch, *answers):
    """Lets names resolve to these addresses, one answer a lookup; the list of the names that were looked up."""
    looked_up, replies, real = [], list(answers), socket.getaddrinfo

    def lookup(host, port, *rest, **options):
        if not isinstance(host, bytes) or not host.endswith(b".example"):
            return real(host, port, *rest, **options)
        if options.get("flags", 0) & socket.AI_NUMERICHOST:
            raise socket.gaierror
        looked_up.append(host.decode())
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (address, port)) for address in replies.pop(0)]

    monkeypatch.setattr(sending.socket, "getaddrinfo", lookup)
    return looked_up


@pytest.mark.parametrize("host", PRIVATE)
def test_private_addresses_are_refused_in_every_form(host):
    with pytest.raises(WebhookAddressRefused):
        check_url(f"https://{host}/hook", "")
    with pytest.raises(WebhookAddressRefused):
        resolve(f"https://{host}:8443/hook", "")


@pytest.mark.parametrize("host", ["93.184.215.14", "[2606:4700::1111]", "[::ffff:8.8.8.8]", "[64:ff9b::808:808]"])
def test_public_addresses_need_https(host):
    check_url(f"https://{host}/hook", "")
    assert resolve(f"https://{host}/hook", "") == host.strip("[]")
    for networks in ("", LOOPBACK):
        with pytest.raises(WebhookAddressRefused, match="https"):
            resolve(f"http://{host}/hook", networks)


@pytest.mark.parametrize("answer", [["127.0.0.1"], ["169.254.169.254"], ["8.8.8.8", "10.0.0.1"]])
def test_names_of_private_addresses_are_refused(monkeypatch, answer):
    names(monkeypatch, answer)
    check_url("https://inner.example/hook", "")
    attempt = send("https://inner.example/hook", "", SECRET, "message_1", b"{}")
    assert attempt.status is None
    assert "an address that is not public" in attempt.error
    assert not any(address in attempt.error for address in answer)


def test_a_network_that_the_operator_allows_is_that_one_only():
    assert resolve("http://127.0.0.1:9/hook", LOOPBACK) == "127.0.0.1"
    assert resolve("http://10.0.0.1/hook", f"{LOOPBACK},10.0.0.0/8") == "10.0.0.1"
    with pytest.raises(WebhookAddressRefused, match="MOBIZO_WEBHOOK_NETWORKS"):
        resolve("http://10.0.0.1/hook", LOOPBACK)


@pytest.mark.parametrize("url", ["https://", "https://[::1", "https://host:99999", "https://me@host", "http://host"])
def test_urls_that_cannot_be_used(url):
    with pytest.raises(WebhookAddressRefused):
        check_url(url, "")


def test_a_name_is_resolved_once_and_tls_verified_for_it(tmp_path, monkeypatch):
    certificate = loopback_certificate(tmp_path, "hooks.example")
    monkeypatch.setenv("SSL_CERT_FILE", str(certificate[0]))
    with receiving(certificate) as receiver:
        looked_up = names(monkeypatch, ["127.0.0.1"], ["127.0.0.1"])
        url = f"https://hooks.example:{receiver.port}/hook?a=b"
        assert send(url, LOOPBACK, SECRET, "message_1", b"{}").status == 204
        assert looked_up == ["hooks.example"]
        (path, headers, _), *_ = receiver.messages
        assert (path, headers["host"]) == ("/hook?a=b", f"hooks.example:{receiver.port}")
        assert receiver.verified(SECRET) == [{}]
        wrong = send(f"https://other.example:{receiver.port}/hook", LOOPBACK, SECRET, "message_2", b"{}")
        assert wrong.status is None
        assert "certificate" in wrong.error.lower()
        assert len(receiver.messages) == 1


@pytest.mark.parametrize("status", [301, 302, 307, 308])
def test_a_redirect_is_not_followed(status):
    with receiving() as receiver:
        receiver.statuses = [status]
        attempt = send(receiver.url, LOOPBACK, SECRET, "message_1", b"{}")
        assert (attempt.status, len(receiver.messages)) == (status, 1)
        assert "redirects are not followed" in attempt.error


@contextlib.contextmanager
def dribbling():
    """A receiver that sends one byte of an endless header every now and then; its port."""
    done = threading.Event()
    with socket.create_server(("127.0.0.1", 0)) as server:

        def dribble():
            connection, _ = server.accept()
            with connection, contextlib.suppress(OSError):
                connection.sendall(b"HTTP/1.1 200 OK\r\nX: ")
                while not done.wait(0.05):
                    connection.sendall(b"x")

        thread = threading.Thread(target=dribble)
        thread.start()
        yield server.getsockname()[1]
        done.set()
        thread.join()


def test_a_receiver_that_never_ends_its_answer(monkeypatch):
    monkeypatch.setattr(sending, "SECONDS", 0.5)
    with dribbling() as port:
        attempt = send(f"http://127.0.0.1:{port}/", LOOPBACK, SECRET, "message_1", b"{}")
    assert attempt.status is None
    assert "no answer within" in attempt.error


def test_a_receiver_that_is_not_there():
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    attempt = send(f"http://127.0.0.1:{port}/", LOOPBACK, SECRET, "message_1", b"{}")
    assert attempt.status is None
    assert "the request failed" in attempt.error
