"""What a failed program is said to have failed of."""

from __future__ import annotations

import json
import os
import select
import sys

import pytest

from tfdist.launch.task import note_to, run_program


def cause_of(tmp_path, source):
    script = tmp_path / "script.py"
    script.write_text(source)
    said = []
    with pytest.raises(SystemExit):
        run_program(str(script), [], is_module=False, failed=lambda code, cause: said.append(cause))
    return said[0]


@pytest.mark.parametrize(
    ("raised", "cause"),
    [
        ("ValueError('boom')", "ValueError: boom"),
        ("ValueError('boom\\nmore')", "ValueError: boom"),
        ("ValueError", "ValueError"),
        (
            "RuntimeError('Graph execution error:\\n\\nDetected at node x\\n"
            "Connection reset by peer\\n\\t [[{{node x}}]] [Op:__inference_1]')",
            "RuntimeError: Graph execution error: Connection reset by peer",
        ),
    ],
)
def test_the_line_that_says_what_happened_is_the_cause(tmp_path, raised, cause, monkeypatch):
    monkeypatch.setattr("sys.argv", ["test"])
    monkeypatch.setattr("sys.path", list(sys.path))
    monkeypatch.setitem(sys.modules, "__main__", sys.modules["__main__"])
    assert cause_of(tmp_path, f"raise {raised}") == cause


def test_a_process_that_the_program_has_forked_does_not_fail_for_its_task():
    read_fd, write_fd = os.pipe()
    failed = note_to(write_fd, task="worker-0")
    child = os.fork()
    if not child:
        failed(3, "exit code 3")  # as `sys.exit(3)` there calls it
        os._exit(0)
    os.waitpid(child, 0)
    failed(4, "ValueError: mine")
    note = json.loads(os.read(read_fd, 4096))
    assert (note["task"], note["exit_code"], note["cause"]) == ("worker-0", 4, "ValueError: mine")
    os.close(read_fd)
    os.close(write_fd)


def test_a_note_is_one_piece_whatever_the_cause():
    read_fd, write_fd = os.pipe()
    cause = "\N{FIRE}\udc80" * 1000
    note_to(write_fd, task="worker-0")(1, cause)
    data = os.read(read_fd, 1 << 16)
    assert len(data) <= select.PIPE_BUF
    assert cause.startswith(json.loads(data)["cause"])
    os.close(read_fd)
    os.close(write_fd)
