"""The model and data of a benchmark: of a configuration, or of ``file.py:function``."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import keras

from tfdist.argument_parser import load_function
from tfdist.configs.command_line import parse
from tfdist.errors import UsageError


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Subject:
    """Model with the data to train it on.

    Attributes:
      x, y: as in `tfdist.fit`; None where only the model is known.
      batch_size: the global batch that the configuration asks for.
    """

    model: keras.Model
    x: Any = None
    y: Any = None
    batch_size: int | None = None


def of_config(argv: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return the flags of `tfdist.train`, each with its value, and all other words."""
    config, ours, rest = list[str](), list[str](), list(argv)
    while rest:
        word = rest.pop(0)
        if not word.startswith("--config"):
            ours.append(word)
            continue
        config.append(word)
        if "=" not in word and rest and not rest[0].startswith("--"):  # else a switch
            config.append(rest.pop(0))
    return config, ours


def read(words: Sequence[str], *, strategy: Any) -> Subject:
    """Return the subject that a command line names.

    Args:
      words: ``file.py:function``, or flags of `tfdist.train` such as ``--config=configs/x.py``.
      strategy: in whose scope the model is made.

    Raises:
      UsageError: there is no such file or function, or it returns something else.
    """
    if len(words) == 1 and not words[0].startswith("-"):
        return _of_function(words[0], strategy=strategy)
    return _of_config(parse(list(words)).config, strategy=strategy)


def _of_config(config: Any, *, strategy: Any) -> Subject:
    from tfdist.app import recipe

    keras.config.set_dtype_policy(config.precision)
    keras.utils.set_random_seed(config.seed or 0)
    datasets = recipe.load_datasets(config)
    steps = recipe.plan_of(config).total_steps
    with strategy.scope():
        model = recipe.compiled_model(config, datasets, total_steps=steps)
    return Subject(model=model, x=datasets.training, batch_size=config.global_batch_size)


def _of_function(name: str, *, strategy: Any) -> Subject:
    """Call the function inside the strategy's scope."""
    function = load_function(name, functools.partial(_bad, name))
    with strategy.scope():
        made = function()
    parts = made if isinstance(made, tuple) else (made,)
    if not 1 <= len(parts) <= 3 or not isinstance(parts[0], keras.Model):
        raise _bad(name, f"{type(made).__name__} is not (model, x, y), (model, x) or a keras.Model")
    return Subject(model=parts[0], **dict(zip(("x", "y"), parts[1:], strict=False)))


def _bad(name: str, problem: str) -> UsageError:
    return UsageError(
        name,
        problem,
        fix="pass FILE.py:FUNCTION, the function that makes the program's model and data",
        code="not-a-subject",
    )
