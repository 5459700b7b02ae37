"""Kubernetes: what the shell of a pod runs around a task. Pure."""

from __future__ import annotations

import shlex
from collections.abc import Mapping

# The shell is process 1, to which alone Kubernetes sends SIGTERM. As process 1 it would be deaf to
# it without a trap, and so would be a task in its place that has no handler yet, while it imports
# TensorFlow or waits for its peers.
_TFDIST = """\
trap 'exit 143' TERM
if ! "$1" -c 'import tfdist' 2>/dev/null; then
  echo {message}
  exit 2
fi
"""
# The wait that a trap ends is begun again until the task has ended.
_TASK = """\
"$@" &
trap 'again=yes; kill -TERM "$!"' TERM
code=
again=yes
while [ "$again" ]; do
  again=
  wait "$!"
  now=$?
  case "$now" in
    127 | -1) code=${code:-$now} ;;
    *) code=$now ;;
  esac
done
"""


def script(*, image: str, python: str, codes: Mapping[int, int], from_index: int | None) -> str:
    """Returns what the pod's shell runs, with the program and its arguments as ``$@``.

    A task that ends with a code in `codes` ends its pod with the other one; `from_index` as in
    `Role.codes_from_index`.
    """
    message = shlex.quote(
        f"image {image}: received no tfdist for {python}; expected it installed. "
        "Fix: build it into the image, or name the Python that has it with --python"
    )
    when = f'[ "$JOB_COMPLETION_INDEX" -ge {from_index} ] && ' if from_index is not None else ""
    changes = [f'{when}[ "$code" = {old} ] && code={new}\n' for old, new in codes.items()]
    return "".join([_TFDIST.format(message=message), _TASK, *changes, 'exit "$code"\n'])


def literal(text: str) -> str:
    """Returns what Kubernetes turns into `text`: it replaces $(NAME), and $$ by one dollar."""
    return text.replace("$", "$$") if "$(" in text or "$$" in text else text
