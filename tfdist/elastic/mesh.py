"""Operations of the members of an elastic job, over sockets that the launcher makes.

Every member runs the same operations in the same order. An operation needs a part of each member.
If a member is lost, the launcher sends the others a new view (list of members). They run the
operation again, and keep computed parts. A member that is one operation behind gets its result.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import logging
import os
import select
import socket
import ssl
import struct
import threading
import time
import zlib
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np

from tfdist import phases
from tfdist.elastic.host_links import LESSON, NOT_NOW, HostLinks
from tfdist.elastic.shards import Array, Block, aligned_like, blocks_of, shards_of, tree_sum
from tfdist.elastic.shared_sums import SharedSums
from tfdist.errors import require
from tfdist.strategy.ring import (
    BUFFER_BYTES,
    Members,
    chunks_of,
    close_in_children,
    remove_first,
    views_of,
)

_LOG = logging.getLogger(__name__)
_HEADER = struct.Struct("<IQI")  # epoch, number of the operation, checksum of its description
_MOST_BYTES, _MOST_FDS = 1 << 16, 64
_BUFFERS_A_CALL = 64
_BYTES_A_CALL = 1 << 18  # over TLS, which takes one buffer a call
_MOST_GATHERED_BYTES = 1 << 28
"""Bytes of outputs before the training loop that are kept for tasks that join."""
_LESSON_TRIES, _LESSON_AGAIN_S = 10, 5.0
_LESSON_S = 30.0  # longest pause within a lesson from another host
_NO_STATE = -1  # number of finished operations in a task that waits to join
_NO_TEACHER = "lost the worker that sends the earlier results"
_NEED_OTHERS = (
    *("a step", "outputs of", "sparse gradients", "broadcast", "the next block of"),
    "the chief's value of a variable",
)
_Result = tuple[int, tuple[int, ...], list[Array]]  # checksum of the description, members, result
Compute = Callable[[int], Sequence[Array]]
"""Function of a shard that returns its part of an operation. It changes nothing."""


class _ViewChanged(Exception):
    """The launcher has announced a new view."""


class _Broken(Exception):
    """A peer has exited, or a connection between hosts is broken. The next view follows."""


class Mesh(Members):
    """This member's connections to the launcher and to the other members.

    Args:
      control: Socket to the launcher, with one message per packet.
      member: Number of this member.
      names: Names of all members, for messages.
      links: Connections to members on other hosts, `None` in a job on one host.
    """

    def __init__(
        self,
        control: socket.socket,
        member: int,
        names: Sequence[str],
        links: HostLinks | None = None,
    ) -> None:
        self._control, self._member, self._names = control, member, names
        self._links = links
        self.epoch = 0
        self.done = 0
        """Number of finished operations."""
        self.members: tuple[int, ...] = ()
        self.lost = ""
        """Reason why the mesh is closed, or ""."""
        self.differs: tuple[str, str] | None = None
        self._announced = 0
        self._go: tuple[dict[str, Any], list[int]] | None = None
        self._peers: dict[int, socket.socket] = {}
        self._shared: SharedSums | None = None
        """Memory of the members, `None` if there is one member or several hosts."""
        self._last: Callable[[], list[Array]] = list
        """Function that returns the result of the last operation."""
        self._in_memory: Callable[[], list[Array]] | None = None
        """This function for a result in shared memory, where it is until the operation after."""
        self._at_work = threading.Lock()
        self._log: list[_Result] | None = []
        """Results of operations before the training loop: the lesson for tasks that join later."""
        self._gathered_bytes = 0
        self._pupils: list[socket.socket | int] = []
        """Sockets to tasks that wait for a lesson, or their numbers if they are on other hosts."""
        self._replay: deque[_Result] | None = None
        """Results of the others' operations that this task repeats, `None` in a member."""
        self._taught: tuple[int, ...] = ()
        """Members that ran the operation that this task has repeated last."""
        self._is_replaceable = False
        self.is_offline = False
        """True while a joining task runs operations on its own."""
        self._lesson: list[_Result] | None = []
        self._state: Callable[[], list[Array]] | None = None
        self._received: list[Array] = []
        self.knocking: list[int] = []
        """Tasks that wait to join, in the chief."""
        close_in_children(self)
        self._say(ready=True)

    def own_shards(self, shards: int) -> range:
        """Return the shards that this member computes. It waits for the first view."""
        if not self._is_in_view():
            return range(1)
        rank = self.members.index(self._member)
        return shards_of(rank, members=len(self.members), shards=shards)

    def _is_in_view(self) -> bool:
        """Return whether this task is a member. It waits for the first view."""
        if self.is_offline or (not self.members and self._is_on_its_own()):
            return False
        if not self.members:
            with phases.waiting_for_all():
                self._run(lambda: [], of="the first view", is_logged=False)
        return True

    @property
    def is_first(self) -> bool:
        """True in the chief, whose values the other workers take. It waits for the first view."""
        return self._is_in_view() and self.members[0] == self._member

    @property
    def absent(self) -> list[int]:
        """Members that the job has lost."""
        present = (self._member,) if self.is_offline else self.members or self._taught
        return [i for i in range(len(self._names)) if present and i not in present]

    # joining

    def begin_loop(self) -> bool:
        """Note that the training loop begins. Return whether this task has to join it."""
        if self._replay is not None:
            require(
                not self._replay,
                "elastic",
                "this task has run fewer operations than the others before the training loop",
                fix="start the job again. Each start must run the same calls before the loop",
                code="other-start",
            )
            self._replay, self._log, self.is_offline = None, None, True
            return True
        if self._log is not None:
            self._lesson, self._log = self._log, None
            self._teach()
        return False

    def end_loop(self) -> None:
        """Note that the first training loop is over. Tasks that wait to join wait for the end."""
        self._lesson = None
        self._teach()

    def join(self) -> list[Array]:
        """Wait until the others admit this task, and return the state that they send."""
        self.done = _NO_STATE
        with phases.entered("join"):
            self._say(knock=True)
            while not self._received:
                self._enter_next()
        state, self._received = self._received, []
        return state

    def say_replaceable(self, is_replaceable: bool) -> None:
        """Tell the launcher whether another member can replace the chief."""
        if is_replaceable != self._is_replaceable:
            self._is_replaceable = is_replaceable
            self._say(is_replaceable=is_replaceable)

    def go_online(self) -> None:
        """Take part in the operations from now on."""
        self.is_offline = False

    def admit(self, member: int, state: Callable[[], list[Array]]) -> None:
        """Let a task join. `state` returns the arrays that the task needs to go on."""
        self._state = state
        self.knocking = [other for other in self.knocking if other != member]
        before = self.epoch
        self._say(admit=member, epoch=before)
        while self.epoch == before:  # the next operation needs the new member
            self._enter_next()

    def _teach(self) -> None:
        """Send the results of the operations before the loop to the tasks that wait for them."""
        if self._log is not None:
            return
        while self._pupils:  # in threads, because a pupil that compiles its step reads late
            sent = self._pupils.pop(), self._lesson
            threading.Thread(target=self._send_lesson, args=sent, daemon=True).start()

    def _send_lesson(self, to: socket.socket | int, lesson: Sequence[_Result] | None) -> None:
        with contextlib.suppress(OSError), contextlib.ExitStack() as stack:
            if isinstance(to, int):
                assert self._links is not None
                to = self._reached(to, self._links)
            _send_lesson(stack.enter_context(to), lesson)

    def _reached(self, pupil: int, links: HostLinks) -> socket.socket:
        """Connect to a task on another host, and repeat it after a failure, or raise OSError."""
        for _ in range(_LESSON_TRIES):
            try:
                return links.connect(pupil, LESSON, timeout_s=None)  # it may load data first
            except OSError as error:
                name, wait_s = self._names[pupil], _LESSON_AGAIN_S
                _LOG.warning("no connection to %s (%s); again in %g s", name, error, wait_s)
            time.sleep(wait_s)
        raise ConnectionError("the task that joins cannot be reached")

    def _teacher(self, fds: Sequence[int]) -> socket.socket:
        """Return the connection to a teacher, which connects from another host if there is no fd.

        Raises OSError if the launcher sends another message first.
        """
        if fds:
            return socket.socket(fileno=fds[0])

        def hear() -> None:
            if select.select([self._control], [], [], 0)[0]:
                raise InterruptedError("the launcher sends a message")

        assert self._links is not None
        any_member = range(len(self._names))  # it may connect before the launcher names it
        (found,) = self._links.accept(any_member, LESSON, self._control, hear).values()
        found.settimeout(_LESSON_S)
        return found

    def _learn(self, fds: Sequence[int]) -> bool:
        """Read the results of the operations before the loop. Return False if there are none."""
        if self._replay is not None or self.is_offline:
            for fd in fds:  # the first teacher has exited after its lesson
                os.close(fd)
            return True
        try:
            with phases.entered("join"), self._teacher(fds) as teacher:
                self._lesson = _read_lesson(teacher)
        except InterruptedError:
            return False
        except OSError:
            if not fds:  # the network failed, or the teacher's host
                self._say(ready=True)
            return False
        if self._lesson is None:
            self._wait_for_the_end()
        self._replay = deque(self._lesson or ())
        return True

    @property
    def previous_name(self) -> str:
        return "another worker"

    # operations

    def sum(self, *arrays: Array, of: str = "") -> list[Array]:
        """Return the sum of each array over the members, in the order of the members.

        A lost member's arrays may be missing in the sum.
        """
        own = [np.array(array, order="C") for array in arrays]

        def attempt() -> list[Array]:
            rank, count = self.members.index(self._member), len(self.members)
            return self._tree(own, {(rank, rank + 1): own}, rank, count, count)

        kept = self._run(attempt, of=f"{of} {[(a.dtype.name, a.shape) for a in own]}")
        return [total.copy() for total in kept]  # other members may need the result later

    def sum_shards(self, compute: Compute, shards: int, *, of: str) -> list[Array]:
        """Return the sum over all shards of each array of `compute`.

        The bits do not depend on the members. Parts that are already computed are kept if the
        members change.
        """
        computed: dict[int, Sequence[Array]] = {}

        def attempt() -> list[Array]:
            rank, count = self.members.index(self._member), len(self.members)
            own = shards_of(rank, members=count, shards=shards)
            self._compute(own, compute, computed)
            if self._shared is not None:
                return self._summed_in_memory(self._shared, compute, computed, shards, of=of)
            like = computed[next(iter(computed))] if computed else compute(0)
            leaves = {(s, s + 1): computed[s] for s in own}
            mine = {b: tree_sum(leaves, *b) for b in blocks_of(own, shards=shards)}
            return self._tree(like, mine, rank, count, shards, of=of)

        return self._run(attempt, of=of, agrees=True)

    def gather_shards(self, compute: Compute, shards: int, *, of: str) -> list[list[Array]]:
        """Return the arrays of each shard, in the order of the shards. Shapes may differ."""
        computed: dict[int, Sequence[Array]] = {}
        found: list[list[Array]] = []

        def attempt() -> list[Array]:
            rank, count = self.members.index(self._member), len(self.members)
            self._compute(shards_of(rank, members=count, shards=shards), compute, computed)
            owners = {
                s: self.members[r]
                for r in range(count)
                for s in shards_of(r, members=count, shards=shards)
            }
            return self._gathered(computed, owners)

        result = self._run(attempt, of=of)
        if self._log is not None:
            self._gathered_bytes += sum(array.nbytes for array in result)
            if self._gathered_bytes > _MOST_GATHERED_BYTES:  # no task can join from now on
                self._log = self._lesson = None
                self._teach()
        flat = iter(result)
        for _ in range(shards):
            (size,) = next(flat)
            found.append(list(itertools.islice(flat, int(size))))
        return found

    def close(self) -> None:
        """Close all connections."""
        self._leave("this worker closed the mesh")

    def _leave(self, reason: str) -> None:
        self.lost = self.lost or reason
        self._drop_peers()
        self._control.close()
        if self._links is not None:
            self._links.close()

    def _compute(self, own: range, compute: Compute, computed: dict[int, Sequence[Array]]) -> None:
        for shard in own:
            if shard not in computed:
                self._hear()
                computed[shard] = [np.asarray(array, order="C") for array in compute(shard)]

    def _run(
        self,
        attempt: Callable[[], list[Array]],
        *,
        of: str,
        is_logged: bool = True,
        agrees: bool = False,
    ) -> list[Array]:
        """Run an operation until it is done in some view, and return its result.

        `agrees` says that `attempt` compares the operation with the other members' operations.
        """
        if self.lost:
            raise ConnectionError(self.lost)
        if not self._at_work.acquire(blocking=False):
            raise RuntimeError(
                "two threads of this worker run collectives at the same time. Fix: call "
                "collectives from one thread"
            )
        phases.set_at_sum(True)
        try:
            if self._is_on_its_own():
                return self._repeated(attempt, of)
            self._in_memory = None
            result = self._until_done(attempt, of, agrees=agrees)
        except OSError as error:
            self._leave(str(error))
            raise ConnectionError(self.lost) from error
        finally:
            phases.set_at_sum(False)
            self._at_work.release()
        self.done += 1
        self._last, self._state = self._in_memory or (lambda: result), None
        if self._log is not None and is_logged:
            self._log.append((zlib.crc32(of.encode()), self.members, result))
        return result

    def _is_on_its_own(self) -> bool:
        while not (self.epoch or self._announced or self._replay is not None or self.is_offline):
            with contextlib.suppress(_ViewChanged):
                self._hear(wait=True)
        return self._replay is not None or self.is_offline

    @property
    def can_admit(self) -> bool:
        """True while a task can join the training loop."""
        return self._log is None and self._lesson is not None

    def _repeated(self, attempt: Callable[[], list[Array]], of: str) -> list[Array]:
        """Return the others' result of an operation, or this task's part if there is none."""
        if self._replay is None:
            require(
                not of.startswith(_NEED_OTHERS),
                "elastic",
                f"a hook before the first step runs {of}, which a task that joins cannot run",
                fix="run collectives, evaluate and predict in later hooks",
                code="other-start",
            )
            members, self.members = self.members, (self._member,)
            try:
                return attempt()
            finally:
                self.members = members
        key = zlib.crc32(of.encode())
        require(
            bool(self._replay) and self._replay[0][0] == key,
            "elastic",
            f"this task runs {of} before the training loop, but the others did not",
            fix="start the job again. Each start must run the same calls before the loop",
            code="other-start",
        )
        _, self._taught, result = self._replay.popleft()
        return result

    def _until_done(
        self, attempt: Callable[[], list[Array]], of: str, *, agrees: bool
    ) -> list[Array]:
        given: list[Array] | None = None
        is_in_view = self.epoch > 0
        while True:
            try:
                if not is_in_view:
                    given, is_in_view = self._enter(), True
                if given is not None:
                    return given
                self._hear()
                if not agrees:
                    self._agree(of, {})
                return attempt()
            except (_Broken, _ViewChanged):
                is_in_view = False

    # views

    def _say(self, **message: Any) -> None:
        self._control.send(json.dumps(message).encode())

    def _hear(self, *, wait: bool = False) -> None:
        """Read the launcher's messages. Raise `_ViewChanged` for a new view."""
        while wait or select.select([self._control], [], [], 0)[0]:
            data, fds, _, _ = socket.recv_fds(
                self._control, _MOST_BYTES, _MOST_FDS, socket.MSG_CMSG_CLOEXEC
            )
            if not data:
                raise ConnectionError("lost the launcher")
            message, wait = json.loads(data), False
            if "leave" in message:
                self._leave("this worker has left the job")
                phases.enter("done")
                raise SystemExit(0)
            if "pem" in message and self._links is not None:
                self._links.use(message["pem"])
                continue
            if "join" in message:
                if self._learn(fds):
                    return
                wait = True  # the launcher connects another teacher
                continue
            if "teach" in message:
                self._pupils.append(socket.socket(fileno=fds[0]) if fds else message["teach"])
                self._teach()
                continue
            if "knock" in message:
                self.knocking = [*{*self.knocking, message["knock"]}]
                continue
            if "view" in message:
                self._announced = message["view"]
                self._forget_go()
                raise _ViewChanged
            self._forget_go()
            self._go = message, list(fds)

    def _wait_for_the_end(self) -> None:
        """Wait until the launcher ends this task, which came too late."""
        phases.enter("join")
        while self._control.recv(_MOST_BYTES):
            pass
        raise ConnectionError("lost the launcher")

    def _forget_go(self) -> None:
        for fd in self._go[1] if self._go else ():
            os.close(fd)
        self._go = None

    def _enter(self) -> list[Array] | None:
        """Enter the newest view. Return the result of this operation if others have it already."""
        while True:
            with contextlib.suppress(_ViewChanged):
                if self._announced <= self.epoch:
                    self._hear(wait=True)
                    continue
                epoch = self._announced
                self._drop_peers()
                self._say(ack=epoch, done=self.done, has_state=self._state is not None)
                while self._go is None or self._go[0]["go"] != epoch:
                    self._hear(wait=True)
                go, fds = self._go
                self._go = None
                self.epoch, self.members = epoch, tuple(go["members"])
                others = [member for member in go["here"] if member != self._member]
                self._peers = {
                    peer: socket.socket(fileno=fd) for peer, fd in zip(others, fds, strict=True)
                }
                if far := set(self.members).difference(go["here"]):
                    assert self._links is not None
                    self._peers |= self._links.meet(far, epoch, self._control, self._hear)
                for end in self._peers.values():
                    end.setblocking(False)
                    end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, BUFFER_BYTES)
                if others and not far:
                    self._shared = SharedSums(self._member, self._peers, self._wait_for)
                return self._caught_up(go)

    def _enter_next(self) -> None:
        """Enter the next view, without an operation."""
        try:
            with contextlib.suppress(_Broken, _ViewChanged):
                self._enter()
        except OSError as error:
            self._leave(str(error))
            raise ConnectionError(self.lost) from error

    def _caught_up(self, go: Mapping[str, Any]) -> list[Array] | None:
        behind, joining = go["behind"], go["joining"]
        if self._member == go["source"]:
            for peer in joining:
                assert self._state is not None
                self._send_arrays(peer, self._state())
            for peer in (*joining, *behind):
                self._send_arrays(peer, self._last())
        if self._member in joining:
            with phases.entered("rendezvous"):  # the source waits for this task
                state, last = (self._receive_arrays(go["source"]) for _ in range(2))
            self._received, self._last = state, lambda: last  # it may be the next source
            self.done = go["done"]
        return self._receive_arrays(go["source"]) if self._member in behind else None

    def _drop_peers(self) -> None:
        self._shared = None
        for end in self._peers.values():
            end.close()
        self._peers = {}

    # exchanges

    def _agree(self, of: str, out: Mapping[int, Sequence[Any]]) -> Mapping[int, Sequence[Any]]:
        """Compare the operation with the other members' operations, and begin to send `out`.

        Return the rest of `out`.
        """
        header = _HEADER.pack(self.epoch, self.done, zlib.crc32(of.encode()))
        theirs = {peer: bytearray(_HEADER.size) for peer in self._peers}
        rest = self._exchange(
            {peer: [header, *out.get(peer, ())] for peer in self._peers},
            {peer: [found] for peer, found in theirs.items()},
            has_more=bool(out),
        )
        for peer, found in theirs.items():
            if found != header:
                self.differs = f"another sum ({self._names[peer]})", of
                raise ConnectionError(f"{self._names[peer]} runs another sum than {of}")
        return rest

    def _tree(
        self,
        like: Sequence[Array],
        mine: Mapping[Block, Sequence[Array]],
        rank: int,
        count: int,
        leaves: int,
        *,
        of: str = "",
    ) -> list[Array]:
        """Sum over all members' subtrees: each member sums a part of the elements for all.

        With `of`, the members also compare their operations.
        """
        if count == 1:
            return tree_sum(mine, 0, leaves)
        sizes = tuple(array.size for array in like)
        chunks = chunks_of(sizes, count, apart=False)
        flat = {b: [a.reshape(-1) for a in arrays] for b, arrays in mine.items()}
        out = {
            peer: [v for arrays in flat.values() for v in views_of(arrays, chunks[r])]
            for r, peer in enumerate(self.members)
            if r != rank
        }
        pieces = chunks[rank]
        have = {
            b: [arrays[i][start:stop] for i, start, stop in pieces] for b, arrays in flat.items()
        }
        into: dict[int, list[Any]] = {}
        for r, peer in enumerate(self.members):
            if r == rank:
                continue
            into[peer] = []
            theirs = shards_of(r, members=count, shards=leaves)
            for block in blocks_of(theirs, shards=leaves):
                have[block] = [np.empty(stop - start, like[i].dtype) for i, start, stop in pieces]
                into[peer] += have[block]
        self._exchange(self._agree(of, out) if of else out, into)
        totals = [aligned_like(array) for array in like]
        flat_totals = [total.reshape(-1) for total in totals]
        tree_sum(have, 0, leaves, out=[flat_totals[i][start:stop] for i, start, stop in pieces])
        own = list(views_of(flat_totals, pieces))
        self._exchange(
            {peer: own for peer in self._peers},
            {
                peer: list(views_of(flat_totals, chunks[r]))
                for r, peer in enumerate(self.members)
                if r != rank
            },
        )
        return totals

    def _summed_in_memory(
        self,
        shared: SharedSums,
        compute: Compute,
        leaves: dict[int, Sequence[Array]],
        shards: int,
        *,
        of: str,
    ) -> list[Array]:
        """Sum over all members' subtrees, which each member writes to its shared memory."""
        count = len(self.members)
        blocks = {
            member: blocks_of(shards_of(rank, members=count, shards=shards), shards=shards)
            for rank, member in enumerate(self.members)
        }
        like = leaves[next(iter(leaves))] if leaves else compute(0)
        most = max(map(len, blocks.values()))
        if not shared.fits(like, most):
            self._agree(of, {})
            try:
                shared.share(like, most)
            except ConnectionError:
                raise self._broken() from None
        arrays_of = shared.begin(like)
        parts = {
            block: arrays_of(member, number)
            for member, theirs in blocks.items()
            for number, block in enumerate(theirs)
        }
        own = {(s, s + 1): arrays for s, arrays in leaves.items()}
        for block in blocks[self._member]:
            tree_sum(own, *block, out=parts[block])
        del own, like
        leaves.clear()  # their memory is used again for the totals
        self._agree(of, {})
        self._in_memory = partial(tree_sum, parts, 0, shards)
        return self._in_memory()

    def _gathered(
        self, computed: Mapping[int, Sequence[Array]], owners: Mapping[int, int]
    ) -> list[Array]:
        found = {peer: [s for s, owner in owners.items() if owner == peer] for peer in self.members}
        mine = [array for s in found[self._member] for array in _counted(computed[s])]
        everyones = self._all_arrays(mine)
        flat: list[Array] = []
        for peer in self.members:
            flat += everyones[peer]
        return flat

    def _all_arrays(self, mine: Sequence[Array]) -> dict[int, list[Array]]:
        """Return the arrays of each member."""
        specs = json.dumps([[a.dtype.name, a.shape] for a in mine]).encode()
        sizes = {peer: bytearray(8) for peer in self._peers}
        size = len(specs).to_bytes(8, "little")
        self._exchange({p: [size] for p in self._peers}, {p: [b] for p, b in sizes.items()})
        texts = {p: bytearray(int.from_bytes(b, "little")) for p, b in sizes.items()}
        self._exchange({p: [specs] for p in self._peers}, {p: [b] for p, b in texts.items()})
        found = {p: [np.empty(s, np.dtype(d)) for d, s in json.loads(t)] for p, t in texts.items()}
        self._exchange(
            {p: list(mine) for p in self._peers},
            {p: list(arrays) for p, arrays in found.items()},
        )
        return {**found, self._member: list(mine)}

    def _send_arrays(self, peer: int, arrays: Sequence[Array]) -> None:
        specs = json.dumps([[a.dtype.name, a.shape] for a in arrays]).encode()
        self._exchange({peer: [len(specs).to_bytes(8, "little"), specs, *arrays]}, {})

    def _receive_arrays(self, peer: int) -> list[Array]:
        size = bytearray(8)
        self._exchange({}, {peer: [size]})
        text = bytearray(int.from_bytes(size, "little"))
        self._exchange({}, {peer: [text]})
        arrays = [np.empty(s, np.dtype(d)) for d, s in json.loads(text)]
        self._exchange({}, {peer: list(arrays)})
        return arrays

    def _exchange(
        self,
        out: Mapping[int, Sequence[Any]],
        into: Mapping[int, Sequence[Any]],
        *,
        has_more: bool = False,
    ) -> Mapping[int, Sequence[Any]]:
        """Send and receive buffers, by peer, while listening to the launcher.

        With `has_more`, do not wait until all is sent. Return the rest of `out`.
        """
        sending = {p: deque(_bytes(buffers)) for p, buffers in out.items()}
        receiving = {p: deque(_bytes(buffers)) for p, buffers in into.items()}
        while any(receiving.values()) or (any(sending.values()) and not has_more):
            moved = False
            for peer, views in sending.items():
                moved |= bool(views) and self._send(peer, views)
            for peer, views in receiving.items():
                moved |= bool(views) and self._receive(peer, views)
            if not moved:
                self._wait(sending, receiving)
        return sending

    def _send(self, peer: int, views: deque[memoryview]) -> bool:
        end = self._peers[peer]
        try:
            if isinstance(end, ssl.SSLSocket):
                sent = end.send(views[0][:_BYTES_A_CALL])
            else:
                buffers = itertools.islice(views, _BUFFERS_A_CALL)
                sent = end.sendmsg(buffers, [], socket.MSG_NOSIGNAL)
        except NOT_NOW:
            return False
        except OSError:
            raise self._broken() from None
        remove_first(views, sent)
        return True

    def _receive(self, peer: int, views: deque[memoryview]) -> bool:
        end = self._peers[peer]
        try:
            if isinstance(end, ssl.SSLSocket):
                received = end.recv_into(views[0])
            else:
                buffers = list(itertools.islice(views, _BUFFERS_A_CALL))
                received = end.recvmsg_into(buffers)[0]
        except NOT_NOW:
            return False
        except OSError:
            raise self._broken() from None
        if not received:
            raise self._broken()
        remove_first(views, received)
        return True

    def _broken(self) -> _Broken:
        """Return the exception for a broken connection. Between hosts, the peer may still run."""
        if self._links is not None:
            self._say(broken=self.epoch)
        return _Broken()

    def _wait(
        self, sending: Mapping[int, deque[memoryview]], receiving: Mapping[int, deque[memoryview]]
    ) -> None:
        poll = select.poll()
        poll.register(self._control, select.POLLIN)
        for peer, end in self._peers.items():
            flags = select.POLLIN * bool(receiving.get(peer))
            flags |= select.POLLOUT * bool(sending.get(peer))
            if flags:
                poll.register(end, flags)
        poll.poll()
        self._hear()

    def _wait_for(self, peer: int) -> None:
        self._wait({}, {peer: deque([memoryview(b"")])})


def _counted(arrays: Sequence[Array]) -> Iterator[Array]:
    yield np.array([len(arrays)])
    yield from arrays


def _bytes(buffers: Sequence[Any]) -> Iterator[memoryview]:
    for buffer in buffers:
        is_array = isinstance(buffer, np.ndarray)
        view = buffer.reshape(-1).view(np.uint8).data if is_array else memoryview(buffer)
        if view.nbytes:
            yield view


def _send_lesson(pupil: socket.socket, lesson: Sequence[_Result] | None) -> None:
    specs = [
        [key, members, [[a.dtype.name, a.shape] for a in arrays]]
        for key, members, arrays in lesson or ()
    ]
    text = b"" if lesson is None else json.dumps(specs).encode()
    pupil.sendall(len(text).to_bytes(8, "little") + text)
    for _, _, arrays in lesson or ():
        for array in arrays:
            pupil.sendall(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)


def _read_lesson(teacher: socket.socket) -> list[_Result] | None:
    """Return the results of the operations before the loop, or `None` if it is over."""
    stream, lesson = teacher.makefile("rb"), list[_Result]()
    size = int.from_bytes(head := stream.read(8), "little")
    text = stream.read(size)
    if len(head) < 8 or len(text) < size:
        raise ConnectionError(_NO_TEACHER)
    if not size:
        return None
    for key, members, specs in json.loads(text):
        arrays = []
        for dtype, shape in specs:
            array = np.empty(shape, np.dtype(dtype))
            view = array.reshape(-1).view(np.uint8).data
            if stream.readinto(view) != view.nbytes:
                raise ConnectionError(_NO_TEACHER)
            arrays.append(array)
        lesson.append((key, tuple(members), arrays))
    return lesson
