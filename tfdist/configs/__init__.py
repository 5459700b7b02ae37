"""Configuration of `tfdist.train`: its fields, their defaults and valid values.

A config file starts from `base()` and changes some fields:

>>> def get_config():
...     config = base()
...     config.dataset = "mnist"
...     return config

Reading or checking a configuration does not import TensorFlow.
"""

from __future__ import annotations

import math
from dataclasses import KW_ONLY, dataclass
from typing import TYPE_CHECKING, Any

from tfdist.errors import UsageError, near

if TYPE_CHECKING:
    from ml_collections import ConfigDict


@dataclass(frozen=True, slots=True)
class Field:
    """One field of a configuration. Its value must match `choices` and the bounds."""

    name: str
    default: Any
    help: str
    _: KW_ONLY
    choices: tuple[str, ...] = ()
    least: float | None = None
    above: float | None = None
    below: float | None = None
    optional_type: type | None = None


FIELDS: tuple[Field, ...] = (
    # Data and model
    Field(
        "dataset", "tfdist_digits", "TFDS name; tfdist_digits, scikit-learn's, needs no download"
    ),
    Field("data_dir", "", "where TFDS keeps its data; '' for its own default"),
    Field("train_split", "train", "TFDS split, slices allowed: 'train[:90%]'"),
    Field("validation_split", "test", "TFDS split to validate on; '' for none"),
    Field(
        "model",
        "cnn",
        "the network; see tfdist/app/recipe.py",
        choices=("dense", "cnn", "resnet20"),
    ),
    Field("dropout", 0.25, "share of units left out", least=0, below=1),
    Field(
        "initial_weights",
        "",
        "a .keras or .weights.h5 file or a checkpoint directory to start from",
    ),
    # Length
    Field("total_examples", 28_800, "length of the run, in training examples", least=1),
    Field(
        "checkpoints",
        10,
        "virtual epochs: the run is validated, logged and saved this often",
        least=1,
    ),
    Field(
        "global_batch_size",
        64,
        "examples of a step, over all replicas; under ps, of one worker's step",
        least=1,
    ),
    Field(
        "early_stopping_patience",
        0,
        "stop after so many virtual epochs without a lower validation loss; 0 never",
        least=0,
    ),
    # Optimization
    Field("optimizer", "adam", "optimizer", choices=("sgd", "adam", "adamw")),
    Field("learning_rate", 1e-3, "highest learning rate", above=0),
    Field(
        "schedule",
        "constant",
        "learning rate over the run: to 0 along a cosine or a line, or not at all",
        choices=("constant", "cosine", "linear"),
    ),
    Field(
        "warmup_examples",
        0,
        "examples over which the learning rate rises; not with `linear`",
        least=0,
    ),
    Field("momentum", 0.9, "of sgd, Nesterov's", least=0, below=1),
    Field("weight_decay", 0.0, "apart from the gradient; 0 for none", least=0),
    Field("clip_norm", 0.0, "highest norm of all gradients; 0 for any", least=0),
    Field("gradient_accumulation_steps", 1, "steps whose gradients make one update", least=1),
    Field(
        "precision",
        "float32",
        "Keras dtype policy",
        choices=("float32", "mixed_bfloat16", "mixed_float16"),
    ),
    Field(
        "seed",
        None,
        "of weights, order, augmentation and dropout; drawn and written down if not given",
        optional_type=int,
        least=0,
        below=2**32,  # NumPy's
    ),
    # Augmentation and normalisation of images, drawn from (seed, pass, example)
    Field(
        "augmentation.random_crop_padding",
        0,
        "pixels to pad each side with before a random crop to the old size",
        least=0,
    ),
    Field("augmentation.random_flip", False, "left to right, half of the time"),
    Field("augmentation.mean", (0.0,), "subtracted, per channel or one for all"),
    Field("augmentation.std", (1.0,), "divided by, per channel or one for all"),
    # Strategy and files
    Field(
        "strategy",
        "auto",
        "auto: the launcher's",
        choices=("auto", "single", "mirrored", "multiworker", "ps", "pipeline"),
    ),
    Field("devices_per_worker", 0, "replicas in each task; 0 for all", least=0),
    Field("run_dir", "", "where the run writes; '' for the launcher's, or runs/"),
    Field(
        "backup_every_steps",
        0,
        "save also every so many steps; 0 only at the end of each virtual epoch",
        least=0,
    ),
    Field(
        "backup_every",
        "steps",
        "auto: save also at intervals chosen from what a save costs and how often runs fail",
        choices=("steps", "auto"),
    ),
    Field("save_model", False, "save the trained model as model.keras"),
    Field(
        "publish",
        "",
        "directory of a server's models: the best checkpoints become versions as the run goes",
    ),
    Field("keep_checkpoints", 2, "checkpoints kept, beside the best by val_loss", least=1),
    Field(
        "tracker",
        "none",
        "also log the run to MLflow or Weights & Biases",
        choices=("none", "mlflow", "wandb"),
    ),
    Field(
        "max_staleness",
        None,
        "under ps: steps of others between a step's reading and its writing; null for any",
        optional_type=int,
        least=0,
    ),
    Field(
        "sharded_optimizer",
        False,
        "under multiworker: each worker keeps the optimizer's state of its part alone",
    ),
    Field(
        "fused_kernels",
        False,
        "normalization, GELU, attention by one kernel each, or a few, which rounds otherwise",
    ),
    # Debugging
    Field(
        "overfit_batches",
        0,
        "train on the first so many batches only, to see that the model can learn; 0 all",
        least=0,
    ),
)

# Fields that may differ between two starts of the same run.
FREE = frozenset(
    {
        "run_dir",
        "data_dir",
        "strategy",
        "devices_per_worker",
        "backup_every",
        "backup_every_steps",
        "keep_checkpoints",
        "save_model",
        "publish",
        "tracker",
        "max_staleness",
        "sharded_optimizer",
        "fused_kernels",
    }
)


def base() -> ConfigDict:
    """Return a locked `ConfigDict` of all fields with their defaults (a CNN on the digits)."""
    from ml_collections import config_dict

    config = config_dict.ConfigDict()
    for field in FIELDS:
        group, _, name = field.name.rpartition(".")
        if group and group not in config:
            config[group] = config_dict.ConfigDict()
        default = field.default
        if field.optional_type:
            default = config_dict.placeholder(field.optional_type)
        (config[group] if group else config)[name] = default
    return config.lock()


def flat(config: ConfigDict) -> dict[str, Any]:
    """Return the configuration as a flat dict: ``{"augmentation.random_flip": False, ...}``."""
    values: dict[str, Any] = {}
    for name, value in config.to_dict().items():
        nested = isinstance(value, dict)
        values.update({f"{name}.{k}": v for k, v in value.items()} if nested else {name: value})
    return values


def check(config: ConfigDict) -> None:
    """Raise UsageError for the first field that is unknown, missing or out of range."""
    values = flat(config)
    known = {field.name: field for field in FIELDS}
    for name in values:
        if name not in known:
            raise unknown(name)
    for field in FIELDS:
        if field.name not in values:
            fix = "begin the config file with base()"
            raise _wrong(field, "nothing", "a value", fix, code="CFG007")
        _check_value(field, values[field.name])
    _check_together(values)


def unknown(name: str, *, where: str = "config") -> UsageError:
    """Return the error for an unknown field, with the closest known field."""
    names = [field.name for field in FIELDS]
    short = {known.rpartition(".")[2]: known for known in names}
    hint = near(name, names) or near(name.rpartition(".")[2], short)
    return UsageError(
        where,
        received=f"unknown field {name!r}{hint}",
        expected="a field of tfdist.configs",
        fix="see python -m tfdist.train --help for all of them",
        code="CFG003",
    )


def _check_value(field: Field, value: Any) -> None:
    if value is None:
        if field.optional_type is None:
            expected = f"a {type(field.default).__name__}"
            raise _wrong(field, "None", expected, "give it a value", code="CFG004")
        return
    if field.choices and value not in field.choices:
        hint = near(str(value), field.choices)
        expected = f"one of {', '.join(field.choices)}"
        raise _wrong(field, f"{value!r}{hint}", expected, "name one of them", code="CFG005")
    if not isinstance(value, (int, float)) or isinstance(value, bool):
        return
    for holds, bound in (
        (field.least is None or value >= field.least, f"{field.least} or more"),
        (field.above is None or value > field.above, f"more than {field.above}"),
        (field.below is None or value < field.below, f"less than {field.below}"),
        (math.isfinite(value), "a finite number"),
    ):
        if not holds:
            fix = f"choose another; it is: {field.help}"
            raise _wrong(field, value, bound, fix, code="CFG006")


def _check_together(values: dict[str, Any]) -> None:
    by_name = {field.name: field for field in FIELDS}

    def wrong(code: str, name: str, expected: str, fix: str) -> UsageError:
        return _wrong(by_name[name], values[name], expected, fix, code=code)

    total = values["total_examples"]
    if values["checkpoints"] > total:
        raise wrong("CFG009", "checkpoints", f"at most total_examples ({total})", "lower it")
    if values["warmup_examples"] >= total:
        raise wrong("CFG010", "warmup_examples", f"less than total_examples ({total})", "lower it")
    if values["warmup_examples"] and values["schedule"] == "linear":
        raise wrong("CFG010", "warmup_examples", "0 with schedule linear", "use cosine")
    for name in ("augmentation.mean", "augmentation.std"):
        numbers = [n for n in values[name] if isinstance(n, (int, float)) and math.isfinite(n)]
        if not numbers or len(numbers) < len(values[name]):
            expected = "finite numbers"
            raise wrong("CFG011", name, expected, "write (0.5,), or a number for each channel")
    if min(values["augmentation.std"]) <= 0:
        fix = "(1.0,) leaves images as they are"
        raise wrong("CFG011", "augmentation.std", "numbers above 0", fix)
    if values["backup_every"] == "auto" and values["backup_every_steps"]:
        expected = "0 with backup_every auto, which computes when to save"
        raise wrong("CFG014", "backup_every_steps", expected, "leave one of them out")
    if values["early_stopping_patience"] and not values["validation_split"]:
        expected = "0 without a validation_split"
        raise wrong("CFG013", "early_stopping_patience", expected, "name one")


def _wrong(field: Field, received: Any, expected: str, fix: str, *, code: str) -> UsageError:
    where = f"config.{field.name}"
    return UsageError(where, received=received, expected=expected, fix=fix, code=code)
