from __future__ import annotations

import contextlib
import re
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from patches.ops.set_command import changes_of
from sage_sched.cli import main
from sage_sched.errors import UserError


@pytest.fixture
def unserved() -> Iterator[str]:
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        yield f"127.0.0.1:{bound.getsockname()[1]}"


def test_what_is_no_address_is_refused() -> None:
    for url in (
        "ftp://localhost", "http://", "http://host:port", "", "http://[::1", "http://u:p@host",
        "http://host/a b", "host\r\nX: y", "host#x", "host?x", "host:99999",
    ):  # fmt: skip
        with pytest.raises(SystemExit, match="2"):
            main(["set", "--url", url])


def test_names_with_dots_are_sections() -> None:
    given = ["schedule_policy=ssjf", "policy.sage.regret=4", "a.b=x=y"]
    changes = {"schedule_policy": "ssjf", "policy": {"sage": {"regret": 4}}, "a": {"b": "x=y"}}
    assert changes_of(given) == changes
    # A value that JSON lacks is text.
    for text in ("2024-01-01", "12:00:00", "{x = 2024-01-01}", "[" * 2000, "1\nb=2", "'''x", "\x01",
                 "0x" + "f" * 5000):  # fmt: skip
        assert changes_of([f"a.b={text}"]) == {"a": {"b": text}}
    for wrong in ("sage", "=1", "a..b=1", "policy=4", "policy.sage.regret=3", "a.b.c=5"):
        with pytest.raises(UserError):
            changes_of([*given, wrong])


def answering(answer: bytes) -> tuple[str, list[bytes]]:
    """Yield the address of a server that always answers this, and its requests."""
    listener, asked = socket.create_server(("127.0.0.1", 0)), list[bytes]()

    def serve() -> None:
        while True:
            connection = listener.accept()[0]
            with connection, contextlib.suppress(OSError), connection.makefile("rb") as sent:
                head = b"".join(iter(sent.readline, b"\r\n"))
                length = re.search(rb"Content-Length: (\d+)", head)
                asked.append(head + sent.read(int(length[1]) if length else 0))
                connection.sendall(answer)

    threading.Thread(target=serve, daemon=True).start()
    return f"127.0.0.1:{listener.getsockname()[1]}", asked


def http(body: bytes, head: bytes = b"200 OK") -> bytes:
    return b"HTTP/1.1 %s\r\nContent-Length: %d\r\n\r\n%s" % (head, len(body), body)


@pytest.mark.parametrize("command", ["set", "whatif"])
@pytest.mark.parametrize(
    "answer",
    [
        b"SSH-2.0-OpenSSH_9\r\n", b"", b"HTTP/1.1",
        b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\n{}",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nZZ\r\nabc",
        b"HTTP/1.1 200 OK\r\nX: " + b"a" * 100_000 + b"\r\n\r\n",
        b"HTTP/1.1 200 OK\r\n" + b"X: a\r\n" * 500 + b"\r\n{}",
        http(b"no JSON"), http(b"\xff"), http(b"[" * 100_000), http(b"[1]", b"400 Bad"),
        http(b"[" * 100_000, b"400 Bad"),
        http(b'{"error": "\\u001b]0;x\\u0007 \\ud800"}', b"400 Bad"),
        http(b"", b"302 F\r\nLocation: /sage/settings"), http(b"", b"404 Not Found"),
    ],
)  # fmt: skip
def test_an_answer_of_another_program_gives_one_line(
    command: str, answer: bytes, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    address, _ = answering(answer)
    argv = ["set", "--url"] if command == "set" else ["whatif", str(tmp_path), "--server"]
    assert main([*argv, address]) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.startswith(f"sage-sched {command}: ")
    assert said.err[:-1].isprintable()
    is_other = command == "set" and b"404" in answer
    assert said.err.endswith("; is it a server under one of our policies?\n") is is_other


def test_a_command_asks_the_named_server_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, unserved: str,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    (tmp_path / "key").write_text("key of the file\n")
    monkeypatch.setenv("SAGE_ADMIN_KEY", "key of the environment")
    other, others = answering(http(b"{}"))
    monkeypatch.setenv("http_proxy", f"http://{other}")
    monkeypatch.delenv("no_proxy", raising=False)
    named, asked = answering(http(b'{"schedule_policy": "sage"}'))
    moved, asked_moved = answering(http(b"", b"302 F\r\nLocation: http://%s/" % other.encode()))
    key = ["--key-file", str(tmp_path / "key")]
    assert main(["set", "--url", named, *key]) == 0
    assert main(["set", "--url", f"http://{named}/", "policy.sage.regret=4"]) == 0
    assert capsys.readouterr().out.split() == ["{", '"schedule_policy":', '"sage"', "}"] * 2
    for argv in (["set", "--url"], ["whatif", str(tmp_path), "--server"]):
        for address in (moved, unserved):
            assert main([*argv, address, *key]) == 2
        assert f"no server answers at http://{unserved}/" in capsys.readouterr().err
    shown, changed = asked
    assert shown.startswith(b"GET /sage/settings HTTP")
    assert b"\r\nAuthorization: Bearer key of the environment\r\n" in changed
    assert changed.startswith(b"POST /sage/settings HTTP")
    assert changed.endswith(b'\r\n{"policy": {"sage": {"regret": 4}}}')
    assert all(b"\r\nAuthorization: Bearer key of the file\r\n" in each
               for each in (shown, *asked_moved))  # fmt: skip
    assert (len(asked_moved), others) == (2, [])


@pytest.mark.parametrize("key", ["secret\nkey", "secret\x7fkey", "secret-ü€-key", "\xff\xfesecret"])
def test_a_malformed_key_is_refused_and_not_shown(
    key: str, tmp_path: Path, unserved: str, capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    (tmp_path / "file").write_bytes(key.encode("latin-1", "replace"))
    monkeypatch.setenv("SAGE_ADMIN_KEY", key)
    for more in ([], ["--key-file", str(tmp_path / "file")]):
        assert main(["set", "--url", unserved, *more]) == 2
        said = capsys.readouterr().err
        assert "no server answers" not in said
        assert "secret" not in said
