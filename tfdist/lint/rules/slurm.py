"""Rules for sbatch scripts."""

from __future__ import annotations

from tfdist.lint.rules.table import error, warning

RULES = (
    error(
        "SLM001",
        "a script without #!",
        reason="sbatch refuses a script whose first line does not name its interpreter.",
    ),
    error(
        "SLM002",
        "#SBATCH after the first command",
        reason="sbatch reads its options up to the first command, and ignores the others.",
    ),
    error(
        "SLM003",
        "a misspelt option of sbatch",
        reason="sbatch refuses the script.",
    ),
    error(
        "SLM004",
        "an option with a value that it cannot have",
        reason="sbatch refuses numbers, times and sizes that it cannot read.",
    ),
    error(
        "SLM005",
        "several tasks and no srun",
        reason="The script runs once, on the first node; srun starts the tasks.",
    ),
    error(
        "SLM006",
        "several launchers on a node",
        reason="Each launcher starts the tasks of its node: one for each node.",
    ),
    warning(
        "SLM007",
        "tasks that nodes and tasks per node do not make",
        reason="Beside --ntasks, --ntasks-per-node is only the most that a node gets.",
    ),
    warning(
        "SLM008",
        "a time limit without a warning before it",
        reason="Without --signal the tasks have only the seconds of KillWait to save.",
    ),
    error(
        "SLM009",
        "a signal for a shell that does nothing with it",
        reason="B: signals the batch shell alone: it needs exec or a trap, or it just dies.",
    ),
    warning(
        "SLM010",
        "too little time to save",
        reason="Tasks begin to save at the signal, and Slurm ends them at the limit.",
    ),
    error(
        "SLM011",
        "a signal at which nothing is saved",
        reason="Tasks save and stop at USR1, TERM and INT; others end them as they are.",
    ),
    warning(
        "SLM012",
        "a requeued job that empties its log",
        reason="With --requeue and without --open-mode=append the log of the first try is lost.",
    ),
    error(
        "SLM013",
        "an arbitrary distribution",
        reason="No task is told where it puts the others.",
    ),
    error(
        "SLM014",
        "TFDIST_HET_GROUPS that is not one type for each component",
        reason="Tasks are numbered by component, and each has its type from there.",
    ),
    error(
        "SLM015",
        "options of memory that exclude each other",
        reason="--mem, --mem-per-cpu and --mem-per-gpu are one or the other.",
    ),
    warning(
        "SLM016",
        "a line that looks like #SBATCH and is none",
        reason="Only lines that begin with #SBATCH, so written, are options; others are comments.",
    ),
    error(
        "SLM017",
        "a shell's variable in #SBATCH",
        reason="sbatch does not expand it: no shell reads these lines.",
    ),
    error(
        "SLM018",
        "variables that srun does not pass on",
        reason="--export=NONE holds for srun as well: TFDIST_ variables do not reach the tasks.",
    ),
    warning(
        "SLM019",
        "an exit code that a pipe hides",
        reason="The code is that of the pipe's last command; set -o pipefail has srun's.",
    ),
    warning(
        "SLM020",
        "an exit code that a later command hides",
        reason="The job's code is that of the script's last command, unless set -e ends it before.",
    ),
)
