"""Rules for config files of tfdist.train and for its flags in scripts and manifests."""

from __future__ import annotations

from tfdist.lint.rules.table import error, warning

RULES = (
    error(
        "CFG001",
        "a config file that is not Python",
        reason="It is a Python file, and does not compile.",
    ),
    error(
        "CFG002",
        "no get_config()",
        reason="tfdist.train calls get_config() and trains what it returns.",
    ),
    error(
        "CFG003",
        "an unknown field",
        reason="The configuration is locked, so that a misspelt field does not pass for a set one.",
    ),
    error(
        "CFG004",
        "a value of the wrong type",
        reason="A field keeps the type of its default.",
    ),
    error(
        "CFG005",
        "a value that is not one of the field's choices",
        reason="Only the names that the table of fields has are known.",
    ),
    error(
        "CFG006",
        "a value out of the field's range",
        reason="The run would be refused before its first step.",
    ),
    error(
        "CFG007",
        "a configuration that does not begin with base()",
        reason="base() has every field with its default; a field that is missing is refused.",
    ),
    error(
        "CFG008",
        "get_config() that returns nothing",
        reason="What is set but not returned is lost.",
    ),
    error(
        "CFG009",
        "more checkpoints than examples",
        reason="The run is cut into as many virtual epochs as checkpoints; each has an example.",
    ),
    error(
        "CFG010",
        "a warm-up as long as the run",
        reason="The learning rate would rise and never be used.",
    ),
    error(
        "CFG011",
        "a mean or deviation that pixels cannot be normalised by",
        reason="Both are numbers, per channel or one for all, and a deviation of 0 divides by 0.",
    ),
    error(
        "CFG012",
        "profile_steps that are no span",
        reason="The profiler needs a first and a last step, in this order.",
    ),
    error(
        "CFG013",
        "early stopping without validation",
        reason="It stops by the validation loss, and there is none.",
    ),
    error(
        "CFG014",
        "a global batch smaller than the replicas",
        reason="Each replica needs an example of each step; an empty share makes weights NaN.",
    ),
    warning(
        "CFG015",
        "BatchNormalization under a parameter server",
        reason="Workers overwrite each other's statistics there; dense and cnn have none.",
    ),
    warning(
        "CFG016",
        "a field that has no effect here",
        reason="momentum is that of sgd; adam and adamw have their own.",
    ),
    warning(
        "CFG017",
        "a run shorter than one step",
        reason="total_examples is in examples, and less than one global batch.",
    ),
    warning(
        "CFG018",
        "backups that are never due",
        reason="A virtual epoch is over, and saved, before backup_every_steps have passed.",
    ),
    warning(
        "CFG019",
        "a field that is set twice",
        reason="The first value has no effect, and may be the one that was meant.",
    ),
    warning(
        "CFG020",
        "validation on the training examples",
        reason="It cannot show whether the model has learned more than them by heart.",
    ),
    error(
        "CFG021",
        "several devices under the strategy single",
        reason="single is one device; mirrored takes more.",
    ),
    warning(
        "CFG022",
        "a config file that imports TensorFlow",
        reason="A mistake in a field is then said seconds later, and the launcher loads it too.",
    ),
    warning(
        "CFG023",
        "max_staleness in a job without ps",
        reason="Other strategies have no stale steps: it bounds nothing, and changes nothing.",
    ),
)
