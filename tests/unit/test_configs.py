"""Configurations and the command line of tfdist.train, without TensorFlow."""

from pathlib import Path

import pytest

from tests.refusals import refusal
from tfdist.configs import FIELDS, FREE, base, check, flat
from tfdist.configs.command_line import help_text, parse

CONFIGS = sorted((Path(__file__).parents[2] / "configs").glob("*.py"))


def config_file(tmp_path: Path, body: str) -> str:
    path = tmp_path / "config.py"
    text = f"from tfdist.configs import base\ndef get_config():\n    c = base()\n    {body}\n"
    path.write_text(text + "    return c\n")
    return str(path)


def test_every_field_has_a_valid_default_and_help():
    config = base()
    check(config)
    assert FREE <= set(flat(config)) == set(FIELDS)
    text = "".join(help_text(full=False).split())
    for field in FIELDS.values():
        assert f"config.{field.name}:" in text
        assert "".join(field.help.split()) in text


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_each_config_file_is_valid(path):
    assert flat(parse(["--config", str(path)]).config)["dataset"]


def test_without_a_file_it_is_the_digits():
    command = parse([])
    assert command.config.dataset == "tfdist_digits"
    assert not command.overwrite


def test_a_file_is_read_and_then_the_overrides(tmp_path):
    path = config_file(tmp_path, "c.global_batch_size = 32; c.dropout = 0; c.max_staleness = 4")
    overrides = ["global_batch_size=128", "augmentation.random_flip", "seed=7"]
    overrides += ["augmentation.std=(0.5,0.25,1)", "max_staleness=null"]
    flags = [f"--config.{override}" for override in overrides]
    command = parse([f"--config={path}", *flags, "--overwrite"])
    expected = {"global_batch_size": 128, "augmentation.random_flip": True, "seed": 7}
    expected |= {"augmentation.std": (0.5, 0.25, 1), "dropout": 0.0}
    found = flat(command.config)
    assert {name: found[name] for name in expected} == expected
    assert isinstance(found["dropout"], float)
    assert (found["max_staleness"], command.overwrite) == (None, True)
    assert parse(["--config", path, "--config.learning-rate", "1"]).config.learning_rate == 1.0
    assert [parse(["--verbosity", level]).verbosity for level in ("-1", "1")] == [-1, 1]


def test_a_missing_config_file_suggests_a_similar_name():
    near = str(CONFIGS[0]).replace(".py", "s.py")
    assert f"'{CONFIGS[0]}'" in str(refusal(lambda: parse(["--config", near])))


@pytest.mark.parametrize(
    ("body", "code", "where"),
    [
        ("c.augmentation.random_fip = True", "CFG003", "line 4"),
        ("c.seed = 'x'", "CFG001", "line 4"),
        ("c.optimizer = None", "CFG004", "config.optimizer"),
        ("raise ValueError('of mine')", "CFG001", "line 4"),
        ("syntax error", "CFG001", "line 4"),
        ("return {}", "CFG001", "config.py"),
        ("c = base().copy_and_resolve_references(); c.unlock(); del c.seed", "CFG001", "seed"),
        ("c.unlock(); c.extra = 1", "CFG003", "config"),
    ],
)
def test_a_wrong_config_file_is_refused_by_its_line(tmp_path, body, code, where):
    error = refusal(lambda: parse(["--config", config_file(tmp_path, body)]))
    assert error.code == code
    assert where in error.where


@pytest.mark.parametrize("content", [b"x = 1\n", b"\x89PNG\x00\x00", b""])
def test_a_file_that_is_no_config_is_refused(tmp_path, content):
    path = tmp_path / "config.py"
    path.write_bytes(content)
    error = refusal(lambda: parse(["--config", str(path)]))
    assert error.code == "CFG001"
    assert str(path) in error.where
