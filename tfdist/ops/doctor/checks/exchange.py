"""Checks of TensorFlow's servers: all-reduce, push and pull, compared with a plain socket."""

from __future__ import annotations

from collections.abc import Iterator

from tfdist.ops.doctor.checks.network import rate
from tfdist.ops.doctor.facts import Exchange, JobFacts
from tfdist.ops.doctor.findings import HostFinding, Topic
from tfdist.ops.rules import rules_of

# An all-reduce of 16 MB between two processes of one machine took 31 ms: 516 MB/s through each of
# them, where a plain socket has gigabytes. What is slower than a connection allows is compared
# with the smaller of the two.
_SERVERS_BYTES_PER_S = 400e6
_SLOW = 4.0
_SLACK_S = 0.02

_RULES = rules_of("""
D901 error: TensorFlow's servers that do not come together
    What a job does first does not work here.
D902 error: an all-reduce with a wrong sum
    Every step would be wrong.
D903 warning: an all-reduce slower than the connection
    Every step of a multiworker job has one, of the size of the model.
D904 warning: a push to a ps slower than the connection
    Every step of a ps job sends its gradients.
D905 warning: a pull from a ps slower than the connection
    Every step of a ps job fetches the weights.
""")


def _check(facts: JobFacts) -> Iterator[HostFinding]:
    found = facts.exchange
    if found is None:
        return
    names = tuple(host.name for host in facts.hosts)
    if found.error:
        expected = "an all-reduce, a push and a pull between all hosts"
        fix = "put right what else is found here; else see whether `import tensorflow` works"
        yield HostFinding("D901", names, found.error, expected, fix)
        return
    if not found.is_right:
        received = "another sum than that of the parts"
        fix = "test the memory and the network cards of the hosts"
        yield HostFinding("D902", names, received, "the sum of what the hosts put in", fix)
    for code, what, took_s, should_s in _times(facts, found):
        if took_s > _SLOW * should_s + _SLACK_S:
            received = f"{took_s * 1e3:.0f} ms for {what} {found.size_bytes >> 20} MiB"
            expected = (
                f"about {should_s * 1e3:.0f} ms by what plain sockets carry "
                f"({rate(_slowest(facts)[0])})"
            )
            fix = "see what else runs on the hosts, and what inspects or limits connections"
            yield HostFinding(code, names, received, expected, fix)


def _times(facts: JobFacts, found: Exchange) -> Iterator[tuple[str, str, float, float]]:
    """Yield code, words, the time taken and the time that the connections allow."""
    if not any(not wire.error for host in facts.present for wire in host.wires):
        return
    speed, latency_s = _slowest(facts)
    bytes_per_s = min(speed, _SERVERS_BYTES_PER_S)
    tasks = max(2, len(facts.hosts))
    # A ring: each of n sends 2(n - 1) pieces of an n-th, one after the other.
    ring_s = 2 * (tasks - 1) * (latency_s + found.size_bytes / tasks / bytes_per_s)
    once_s = 2 * latency_s + found.size_bytes / bytes_per_s
    yield "D903", "an all-reduce of", found.reduce_s, ring_s
    yield "D904", "a push of", found.push_s, once_s
    yield "D905", "a pull of", found.pull_s, once_s


def _slowest(facts: JobFacts) -> tuple[float, float]:
    """Return the least bytes a second and the longest way there and back."""
    wires = [wire for host in facts.present for wire in host.wires if not wire.error]
    return min(w.bytes_per_s for w in wires), max(w.latency_s for w in wires)


def _seen(facts: JobFacts) -> str:
    found = facts.exchange
    if found is None:
        return ""
    return (
        f"{found.size_bytes >> 20} MiB: all-reduce {found.reduce_s * 1e3:.0f} ms, "
        f"push {found.push_s * 1e3:.0f} ms, pull {found.pull_s * 1e3:.0f} ms"
    )


TOPIC = Topic(name="exchange", rules=_RULES, check=_check, seen=_seen)
