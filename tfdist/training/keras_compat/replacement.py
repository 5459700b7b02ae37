"""Replacement of a name of Keras or TensorFlow while a tfdist step is traced."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Replacement:
    """Workaround: what it replaces, by what, and why.

    Attributes:
      owner: the class or module that has the name.
      name: of a method, property or function.
      make: gets the original and returns what stands in for it, which must do what the original
        does wherever no step is traced.
      issue: the public issue, or the line of the released source where there is none.
      ended_by: the release that needs it no longer, such as ``keras 3.16``; None as long as no
        release does without.
    """

    owner: Any
    name: str
    make: Callable[[Any], Any]
    issue: str
    ended_by: str | None = None

    @property
    def target(self) -> str:
        """Return what is replaced, such as ``SeedGenerator.next``."""
        return f"{self.owner.__name__}.{self.name}"

    def put_in_place(self) -> None:
        """Replace the name; to be called once a process."""
        original = getattr(self.owner, self.name)
        replacement = self.make(original)
        if not isinstance(replacement, property):
            replacement = functools.wraps(original)(replacement)
        setattr(self.owner, self.name, replacement)
