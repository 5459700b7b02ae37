"""The token, the terms and the own address: what is decided before anybody is spoken to."""

import importlib
import socket

import pytest

from tests import refusals
from tfdist.errors import UsageError
from tfdist.launch.multihost.agreement import (
    TOKEN_VARIABLE,
    read_token,
    without_secrets,
)
from tfdist.launch.multihost.connection import resolve
from tfdist.launch.multihost.hosts import is_own_address, own_address
from tfdist.launch.multihost.rendezvous import listen

SECRET = "a secret that nobody must see"


@pytest.fixture
def token_file(tmp_path):
    path = tmp_path / "token"
    path.write_text(SECRET + "\n")
    return path


def refusal(**how: object) -> str:
    environ = how.pop("environ", {})
    how = {"path": None, "hosts": ["a", "b"], **how}
    said = str(refusals.refusal(lambda: read_token(environ, **how)))  # type: ignore[arg-type]
    assert said.isprintable()
    assert SECRET not in said
    return said


def test_a_token_comes_from_a_file_or_else_the_environment(token_file):
    assert read_token({TOKEN_VARIABLE: SECRET}, path=None, hosts=["a", "b"]) == SECRET.encode()
    for environ in ({}, {TOKEN_VARIABLE: "x" * 20}):
        assert read_token(environ, path=str(token_file), hosts=["a", "b"]) == SECRET.encode()


def test_a_token_that_cannot_be_used_is_one_line_without_it(tmp_path):
    binary = tmp_path / "binary"
    binary.write_bytes(b"\xff" * 40)
    assert "No such file" in refusal(path=str(tmp_path / "none"))
    assert "Is a directory" in refusal(path=str(tmp_path))
    assert "no text" in refusal(path=str(binary))
    assert "3 characters" in refusal(environ={TOKEN_VARIABLE: "abc"})
    assert "0 characters" in refusal(environ={TOKEN_VARIABLE: ""})


@pytest.mark.parametrize("given", [SECRET, f"sub/{SECRET}", SECRET + "x" * 300, f"{__file__}/x"])
def test_a_token_in_the_place_of_its_file_is_not_repeated(given):
    assert "a path at which nothing is, not shown (" in refusal(path=given)
    assert given not in refusal(path=given)


@pytest.mark.parametrize("program", ["launch", "doctor", "submit", "tune"])
@pytest.mark.parametrize("between", ["=", " "])
def test_no_command_line_takes_a_token_or_repeats_it(program, between, capsys):
    words = f"--rendezvous_token{between}correct-horse-battery-staple".split()
    first = ["--to", "slurm"] if program == "submit" else []
    main = importlib.import_module(f"tfdist.{program}{'.__main__' * (program == 'launch')}").main
    assert main([*first, *words, "train.py"]) == 2
    printed = capsys.readouterr()
    assert "--rendezvous_token" in printed.err
    assert printed.err.count("\n") == 1
    assert "correct-horse" not in printed.out + printed.err


def test_the_values_of_secrets_are_marked_and_still_compared():
    args = ["--lr", "0.1", f"--api_key={SECRET}", "--token", SECRET, "x"]
    shown = without_secrets(args, key=b"k")
    assert SECRET not in " ".join(shown)
    assert shown[:2] == ["--lr", "0.1"]
    assert shown[5] == "x"
    assert shown == without_secrets(args, key=b"k")
    assert shown != without_secrets([*args[:4], "another", "x"], key=b"k")
    assert shown != without_secrets(args, key=b"another")


def test_names_loopback_and_addresses_of_others_are_not_its_own():
    hosts = ("localhost", "127.0.0.1", "[::1]", "0.0.0.0", "[::]", "192.0.2.1", "[2001:db8::1]")
    assert [host for host in hosts if is_own_address(host)] == []


def test_own_addresses_are_bound_to_and_others_refused():
    assert own_address("127.0.0.2", other="127.0.0.1") == "127.0.0.2"
    with pytest.raises(UsageError, match=r"192\.0\.2\.1, no address of this machine"):
        own_address("192.0.2.1", other="127.0.0.1")
    with pytest.raises(UsageError, match="cannot be resolved"):
        own_address("no-such-host.invalid", other="127.0.0.1")


def test_a_name_with_addresses_of_both_kinds_is_one_address_whatever_their_order(monkeypatch):
    both = {
        socket.AF_INET: (socket.AF_INET, socket.SOCK_STREAM, 6, "", ("10.0.0.1", 7)),
        socket.AF_INET6: (socket.AF_INET6, socket.SOCK_STREAM, 6, "", ("fd00::1", 7, 0, 0)),
    }
    for found in (list(both.values()), list(both.values())[::-1]):
        monkeypatch.setattr(socket, "getaddrinfo", lambda *_, found=found, **__: found)
        assert resolve("host", 7) == (socket.AF_INET, ("10.0.0.1", 7))
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: [both[socket.AF_INET6]])
    assert resolve("host", 7) == (socket.AF_INET6, ("fd00::1", 7))


def test_it_listens_at_one_address_alone():
    with listen("127.0.0.2", 0) as listener:
        port = listener.getsockname()[1]
        socket.create_connection(("127.0.0.2", port), timeout=60).close()
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", port), timeout=60)
        with pytest.raises(OSError, match="in use"):
            listen("127.0.0.2", port)
