"""Finding of a check: a rule, the hosts, what was seen, and the fix."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from tfdist.ops.doctor.facts import JobFacts
from tfdist.ops.rules import Rule


@dataclass(frozen=True, slots=True)
class HostFinding:
    """One thing that is wrong; `hosts` are those it is to be put right on."""

    code: str
    hosts: tuple[str, ...]
    received: str
    expected: str
    fix: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Topic:
    """One line of the answer.

    Attributes:
      rules: what can be wrong here.
      check: yields what is.
      seen: returns in a few words what was seen when nothing is; empty where nobody looked.
    """

    name: str
    rules: tuple[Rule, ...]
    check: Callable[[JobFacts], Iterator[HostFinding]]
    seen: Callable[[JobFacts], str]
