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


def refused(arguments: list[str]) -> str:
    message = str(refusal(lambda: parse(arguments)))
    assert ": received " in message
    assert "Fix: " in message
    return message


def test_every_field_has_a_default_that_is_right_and_a_line_of_help():
    config = base()
    check(config)
    assert set(flat(config)) == {field.name for field in FIELDS}
    assert set(flat(config)) >= FREE
    text = "".join(help_text().split())
    for field in FIELDS:
        assert f"--config.{field.name}" in text
        assert "".join(field.help.split()) in text


def test_without_a_file_it_is_the_digits():
    command = parse([])
    assert command.config.dataset == "tfdist_digits"
    assert not command.overwrite
    assert not command.help


def test_a_file_is_read_and_then_the_overrides(tmp_path):
    path = config_file(tmp_path, "c.global_batch_size = 32; c.dropout = 0; c.max_staleness = 4")
    arguments = [
        f"--config={path}",
        "--config.global_batch_size=128",
        "--config.augmentation.random_flip",
        "--config.augmentation.std=(0.5,0.25,1)",
        "--config.seed=7",
        "--config.profile_steps=(3,5)",
        "--config.max_staleness=null",
        "--overwrite",
    ]
    command = parse(arguments)
    assert command.overwrite
    assert command.config.global_batch_size == 128
    assert command.config.dropout == 0.0
    assert isinstance(command.config.dropout, float)
    assert command.config.augmentation.random_flip is True
    assert command.config.augmentation.std == (0.5, 0.25, 1)
    assert command.config.seed == 7
    assert command.config.profile_steps == (3, 5)
    assert command.config.max_staleness is None
    assert parse(["--config", path, "--config.learning_rate", "1"]).config.learning_rate == 1.0


@pytest.mark.parametrize(
    ("argument", "says"),
    [
        ("--config.glbal_batch_size=3", "(did you mean 'global_batch_size'?)"),
        ("--config.augmentation.random_fip=1", "(did you mean 'augmentation.random_flip'?)"),
        ("--config.random_flip=1", "(did you mean 'augmentation.random_flip'?)"),
        ("--config.augmentation=3", "unknown field 'augmentation'"),
        ("--config.seed=x", "--config.seed: received 'x'; expected a whole number"),
        ("--config.global_batch_size=1.5", "received '1.5'; expected a whole number"),
        ("--config.learning_rate=fast", "received 'fast'; expected a number"),
        ("--config.augmentation.random_flip=ja", "received 'ja'; expected true or false"),
        ("--overwrite=x", "--overwrite: received 'x'; expected true or false"),
        ("--confg=x.py", "received --confg (did you mean '--config'?)"),
        ("--global_batch_size=3", "(did you mean '--config.global_batch_size'?)"),
        ("rest", "received rest; expected no more than"),
        ("--config", "--config: received no value"),
        ("--config=/nowhere.py", "received '/nowhere.py', which is no file"),
        ("--config.global_batch_size=0", "received 0; expected 1 or more"),
        ("--config.seed=-1", "received -1; expected 0 or more"),
        ("--config.dropout=1", "received 1.0; expected less than 1"),
        ("--config.learning_rate=0", "received 0.0; expected more than 0"),
        ("--config.optimizer=adm", "received 'adm' (did you mean 'adam'?); expected one of sgd"),
        ("--config.strategy=mirored", "(did you mean 'mirrored'?)"),
        ("--config.checkpoints=30000", "received 30000; expected at most total_examples (28800)"),
        ("--config.warmup_examples=28800", "expected less than total_examples (28800)"),
        ("--config.augmentation.mean=grey", "received 'grey'; expected numbers"),
        ("--config.augmentation.std=0", "received (0,); expected numbers above 0"),
        ("--config.profile_steps=5,3", "received (5, 3); expected (first, last)"),
        ("--config.profile_steps=5", "received (5,); expected (first, last)"),
    ],
)
def test_a_wrong_flag_is_one_line(argument, says):
    assert says in refused([argument])


def test_patience_needs_something_to_be_patient_about():
    assert "0 without a validation_split" in refused(
        ["--config.early_stopping_patience=2", "--config.validation_split="]
    )


@pytest.mark.parametrize(
    ("body", "says"),
    [
        ("c.globl_batch_size = 3", "line 4: received unknown field 'globl_batch_size' (did you"),
        ("c.augmentation.random_fip = True", "(did you mean 'random_flip'?)"),
        ("c.seed = 'x'", "line 4: received c.seed = 'x'; expected a value of type int"),
        ("c.global_batch_size = 1.5", "expected a value of type int"),
        ("raise ValueError('of mine')", "expected a file that runs (ValueError: of mine)"),
        ("c.optimizer = None", "config.optimizer: received None; expected a str"),
        ("syntax error", "line 4: received syntax error; expected a file that runs"),
        ("return {}", "received a dict from get_config(); expected a ConfigDict"),
        ("c = base().copy_and_resolve_references(); c.unlock(); del c.seed", "config.seed: recei"),
        ("c.unlock(); c.extra = 1", "received unknown field 'extra'"),
    ],
)
def test_a_wrong_config_file_is_one_line(tmp_path, body, says):
    assert says in refused(["--config", config_file(tmp_path, body)])


@pytest.mark.parametrize("content", [b"x = 1\n", b"\x89PNG\x00\x00", b""])
def test_a_file_that_is_no_config_is_one_line(tmp_path, content):
    path = tmp_path / "config.py"
    path.write_bytes(content)
    assert str(path) in refused(["--config", str(path)])


def test_a_near_file_is_hinted_at():
    near = str(CONFIGS[0]).replace(".py", "s.py")
    assert f"(did you mean '{CONFIGS[0]}'?)" in refused(["--config", near])
