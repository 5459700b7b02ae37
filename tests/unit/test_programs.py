"""`tfdist` names every program and runs each; what names none is the launcher's."""

import os
import subprocess
import sys

import pytest

import tfdist
from tests.processes import python
from tfdist import __main__ as programs


@pytest.mark.parametrize("words", [(), ("-h",), ("--help",)])
def test_the_overview_names_every_program_and_loads_none(words, capsys):
    assert programs.main(words) == 0
    said = capsys.readouterr().out
    assert all(f"\n  {name} " in said for name in programs.PROGRAMS)


def test_the_version_is_told():
    done = python("-m", "tfdist", "--version")
    told = f"tfdist {tfdist.__version__}\n"
    assert (done.returncode, done.stdout, done.stderr) == (0, told, "")


@pytest.mark.parametrize("word", ["--help", "env"])
def test_who_reads_no_further_is_no_error(word):
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, "-m", "tfdist", word]
    done = subprocess.run(command, stdout=writer, stderr=subprocess.PIPE, timeout=60)
    os.close(writer)
    assert (done.returncode, done.stderr) == (141, b"")


@pytest.mark.parametrize("name", programs.PROGRAMS)
def test_every_program_tells_its_flags(name):
    done = python("-m", "tfdist", name, "--help")
    assert (done.returncode, done.stderr) == (0, "")
    assert f"python -m tfdist.{name}" in done.stdout
    assert len(done.stdout.splitlines()) > 4


def test_what_names_no_program_is_the_launchers(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "job.py").write_text("print('here')")
    (tmp_path / "trains").write_text("print('here')")
    for words in (["--dry_run", "job.py"], ["--workers", "2", "--dry_run", "trains"]):
        assert programs.main(words) == 0
        assert "# worker-0" in capsys.readouterr().out


@pytest.mark.parametrize(("wrong", "meant"), [("tunee", "tune"), ("lauch", "launch")])
def test_a_misspelt_program_is_one_line(wrong, meant, capsys):
    assert programs.main([wrong, "--workers", "2"]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert f"received '{wrong}' (did you mean '{meant}'?)" in error


def test_a_missing_script_is_the_launchers_to_tell(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert programs.main(["train.py"]) == 2
    assert "train.py, which does not exist" in capsys.readouterr().err
