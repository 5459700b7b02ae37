"""What a failed program is said to have failed of."""

from __future__ import annotations

import sys

import pytest

from tfdist.launch.program import run_program


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
