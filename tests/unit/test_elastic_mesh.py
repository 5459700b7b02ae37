"""Operations of elastic members over real sockets, with members that are killed at any point."""

import contextlib
import hashlib
import json
import os
import random
import select
import signal
import socket
import ssl
import struct
import subprocess
import sys
import tempfile
import time
import traceback
import types
import zlib
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from functools import cache, partial
from unittest.mock import Mock

import numpy as np
import pytest
from keras.src.callbacks import CallbackList

from tests.refusals import refused
from tests.unit.test_watchdog import play
from tfdist import phases
from tfdist.checkpoint.store import SecondWriter
from tfdist.cluster import hold_ports
from tfdist.cluster.address import split_address
from tfdist.cluster.local_only import listen
from tfdist.elastic import host_links
from tfdist.elastic import mesh as mesh_module
from tfdist.elastic.engine import ElasticEngine, as_tensor
from tfdist.elastic.host_links import HostLinks, _context
from tfdist.elastic.mesh import Mesh, _read_lesson, _send_lesson
from tfdist.elastic.shards import aligned_like, tree_sum
from tfdist.errors import PeerLost
from tfdist.kinds import KINDS
from tfdist.launch.membership import Fence, Go, Membership, View
from tfdist.launch.multihost.hosts import certificate
from tfdist.strategy import broadcast
from tfdist.strategy import job as jobs
from tfdist.training import resume
from tfdist.training.succession import Succession

SHARDS, STEPS, DEADLINE_S = 4, 40, 60.0
PEM = cache(certificate)


def train(mesh: Mesh, steps: int) -> str:
    """A model of NumPy: the state is a function of the sums, and the sums of the state."""
    state = np.ones(1000, np.float32)
    for step in range(steps):
        limit = 0.0
        while not limit:  # the chief was lost, and its successor decides
            mine = np.array([float(steps) if mesh.is_first else 0.0])
            limit = mesh.sum(mine, of="the next step")[0]
        assert limit == steps

        def part(shard: int, state: np.ndarray = state, step: int = step) -> list[np.ndarray]:
            draws = np.random.default_rng((step, shard)).standard_normal(1000, np.float32)
            return [np.sin(state * draws), np.float32([shard])]

        total, count = mesh.sum_shards(part, SHARDS, of="a step")
        assert count == sum(range(SHARDS))
        state = state * np.float32(0.9) + total
        rows = mesh.gather_shards(lambda shard: [np.full(shard, shard)], SHARDS, of="rows")
        assert [len(row) for (row,) in rows] == list(range(SHARDS))
    mesh.sum(np.zeros(1), of="the end")
    return hashlib.sha256(state.tobytes()).hexdigest()


class Job:
    """A launcher of forked members, which kills members when `chaos` says so."""

    def __init__(self, count: int, program=lambda mesh: train(mesh, STEPS), hosts: int = 1) -> None:
        self.hosts, self._held = hosts, hold_ports(count)
        self.addresses = {member: port.address for member, port in enumerate(self._held)}
        self.membership = Membership(expected=count)
        self.ends: dict[int, socket.socket] = {}
        self.pids: dict[int, int] = {}
        self.digests: dict[int, str] = {}
        self._outputs: dict[int, int] = {}
        self.views = 0
        self.killed: set[int] = set()
        names = [f"worker-{i}" for i in range(count)]
        for member in range(count):
            ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            out_fd, in_fd = os.pipe()
            pid = os.fork()
            if pid == 0:
                for end in (ours, *self.ends.values()):
                    end.close()
                code = 1
                try:
                    links = HostLinks(member, self.addresses) if hosts > 1 else None
                    digest = program(Mesh(theirs, member, names, links))
                    os.write(in_fd, digest.encode())
                    code = 0
                except BaseException:
                    traceback.print_exc()
                    sys.stderr.flush()
                os._exit(code)
            theirs.close()
            os.close(in_fd)
            self.ends[member], self.pids[member] = ours, pid
            if hosts > 1:
                self.tell(member, {"pem": PEM()})
            self._outputs[member] = out_fd

    def run(self, chaos=lambda job, now_s: None) -> set[str]:
        deadline_s = time.monotonic() + DEADLINE_S
        while self.ends:
            assert time.monotonic() < deadline_s, "the job hangs"
            for end in select.select(list(self.ends.values()), [], [], 0.002)[0]:
                member = next(m for m, e in self.ends.items() if e is end)
                try:
                    data = end.recv(1 << 16)
                except OSError:
                    data = b""
                if data:
                    self.see(member, json.loads(data))
                else:
                    self.lost(member)
            chaos(self, time.monotonic())
        for port in self._held:
            port.release()
        return set(self.digests.values())

    def see(self, member: int, message: dict) -> None:
        match message:
            case {"ready": _}:
                self.do(self.membership.ready(member))
            case {"broken": epoch}:
                self.do(self.membership.broken(member, epoch))
            case {"ack": epoch, "done": done, "has_state": _}:
                self.do(self.membership.acked(member, epoch, done))

    def lost(self, member: int) -> None:
        self.ends.pop(member).close()
        _, status = os.waitpid(self.pids.pop(member), 0)
        digest = os.read(self._outputs[member], 100).decode()
        os.close(self._outputs.pop(member))
        if digest:
            self.digests[member] = digest
        else:
            assert os.waitstatus_to_exitcode(status) == -signal.SIGKILL
        self.do(self.membership.lost(member))

    def do(self, steps) -> None:
        for step in steps:
            match step:
                case View(epoch, members):
                    self.views += 1
                    for member in members:
                        self.tell(member, {"view": epoch})
                case Go(epoch, members, done, source, behind, _):
                    pairs = {}
                    for i, one in enumerate(members):
                        for other in members[i + 1 :]:
                            pairs[one, other], pairs[other, one] = socket.socketpair()
                    for member in members:
                        here = [o for o in members if o % self.hosts == member % self.hosts]
                        fds = [pairs[member, o].fileno() for o in here if o != member]
                        message = {"go": epoch, "members": members, "here": here, "joining": []}
                        message |= {"source": source, "done": done, "behind": behind}
                        self.tell(member, message, fds)
                    for end in pairs.values():
                        end.close()
                case Fence(member=member):
                    self.kill(member)

    def tell(self, member: int, message: dict, fds=()) -> None:
        with contextlib.suppress(OSError, KeyError):  # it has exited: the next event says so
            socket.send_fds(self.ends[member], [json.dumps(message).encode()], list(fds))

    def kill(self, member: int) -> None:
        if member in self.pids:
            os.kill(self.pids[member], signal.SIGKILL)
            self.killed.add(member)


@pytest.fixture(scope="module")
def undisturbed():
    (digest,) = Job(1).run()
    return digest


def sum_with_slow_readers(mesh: Mesh) -> str:
    """Sums that follow each other. All members except the chief read the parts late."""
    read = tree_sum

    def slow(parts, low, high, out=None):
        if out is None and not mesh.is_first:
            time.sleep(0.002)
        return read(parts, low, high, out)

    mesh_module.tree_sum = slow
    state = np.ones(100_000, np.float32)
    for step in range(3 * STEPS):

        def part(shard: int, state: np.ndarray = state, step: int = step) -> list[np.ndarray]:
            return [np.sin(state * np.float32(step + shard))]

        (total,) = mesh.sum_shards(part, SHARDS, of="a step")
        state = state * np.float32(0.9) + total
    mesh.sum(np.zeros(1), of="the end")
    return hashlib.sha256(state.tobytes()).hexdigest()


@pytest.mark.parametrize("kills", [0, 1, 2])
def test_no_part_is_overwritten_before_all_members_have_read_it(kills):
    rng = random.Random(kills)
    at_s = time.monotonic() + 0.1

    def chaos(job: Job, now_s: float) -> None:
        nonlocal at_s
        if len(job.killed) < kills and job.views and now_s > at_s and len(job.pids) > 1:
            job.kill(rng.choice(sorted(job.pids)))
            at_s = now_s + 0.1

    (alone,) = Job(1, sum_with_slow_readers).run()
    assert Job(4, sum_with_slow_readers).run(chaos) == {alone}


def test_members_that_run_other_operations_are_refused():
    def program(mesh: Mesh) -> str:
        def part(shard: int) -> list[np.ndarray]:
            return [np.ones(9)]

        is_first = mesh.is_first
        with pytest.raises(ConnectionError, match=r"worker-[01] runs another sum than"):
            mesh.sum_shards(part, SHARDS, of="a step") if is_first else mesh.sum(np.ones(9))
        return "refused"

    assert Job(2, program).run() == {"refused"}


def test_a_member_without_descriptors_says_so():
    def program(mesh: Mesh) -> str:
        told = ""
        if mesh.is_first:
            mesh_module.SharedSums.share = Mock(side_effect=OSError(24, "Too many open files"))
        try:
            mesh.sum_shards(lambda shard: [np.ones(9)], SHARDS, of="a step")
        except ConnectionError as error:
            told = str(error)
        return "told" if mesh._member or "Too many open files" in told else told

    assert Job(2, program).run() == {"told"}


@pytest.mark.parametrize("seed", range(12))
def test_survivors_of_random_kills_have_the_same_bits(undisturbed, seed):
    draws = random.Random(seed)
    count = draws.choice([2, 3, 4])
    job, due_s = Job(count), [0.0]

    def chaos(job: Job, now_s: float) -> None:
        if not due_s[0]:
            due_s[0] = now_s + draws.uniform(0.0, 0.1)
        alive = [member for member in job.ends if member not in job.killed]
        if now_s >= due_s[0] and job.membership.epoch and len(alive) > 1:
            job.kill(draws.choice(alive))
            due_s[0] = now_s + draws.uniform(0.0, 0.1)

    assert job.run(chaos) == {undisturbed}
    assert job.views > 1


@pytest.mark.parametrize("seed", range(8))
def test_kills_on_several_hosts_leave_the_bits_unchanged(undisturbed, seed):
    draws = random.Random(seed)
    job, steps = Job(4, hosts=2 + seed % 2), [draws.randrange(1, 40), draws.randrange(1, 40)]

    def chaos(job: Job, now_s: float) -> None:
        steps[0] -= 1
        if job.membership.epoch and steps[0] < 0 and steps[1:]:
            job.kill(draws.randrange(4))
            steps.pop(0)

    assert job.run(chaos) == {undisturbed}


def test_a_broken_connection_between_hosts_is_the_next_view(undisturbed):
    def program(mesh: Mesh) -> str:
        rest = iter(range(STEPS, -1, -1))
        gather = mesh.gather_shards

        def then_break(*args, **options):
            if next(rest) == STEPS // 2 and mesh.is_first:
                for end in mesh._peers.values():
                    end.shutdown(socket.SHUT_RDWR)
            return gather(*args, **options)

        mesh.gather_shards = then_break
        return train(mesh, STEPS)

    job = Job(3, program, hosts=3)
    assert job.run() == {undisturbed}
    assert not job.killed
    assert job.views >= 2


@contextlib.contextmanager
def two_hosts(pem: str):
    """Yield the links of two members, and an end of a socket for the messages to each."""
    with contextlib.ExitStack() as stack:
        held = [stack.enter_context(port) for port in hold_ports(2)]
        ends = [stack.enter_context(end) for end in socket.socketpair()]
        addresses = {member: port.address for member, port in enumerate(held)}
        links = [HostLinks(member, addresses) for member in addresses]
        for each in links:
            stack.callback(each.close)
            each.use(pem)
        yield links, ends


def test_unauthenticated_connections_do_not_become_members():
    """They are silent, say in the clear that they are worker-1, or have an own certificate."""
    hello = struct.pack("<II", 1, 1)
    own = _context(certificate(), ssl.PROTOCOL_TLS_CLIENT)
    own.verify_mode = ssl.CERT_NONE
    with contextlib.ExitStack() as stack, ThreadPoolExecutor() as pool:
        links, ends = stack.enter_context(two_hosts(PEM()))

        def reached() -> socket.socket:
            address = split_address(links[0]._addresses[0])
            return stack.enter_context(socket.create_connection(address, DEADLINE_S / 6))

        accepted = pool.submit(links[0].accept, {1}, 1, ends[0], lambda: None)
        for text in (b"", hello):
            reached().sendall(text)
        with contextlib.suppress(OSError), own.wrap_socket(reached()) as stranger:
            stranger.sendall(hello)
            assert stranger.recv(1) == b""
        with links[1].connect(0, 1, timeout_s=DEADLINE_S) as member:
            (end,) = accepted.result(DEADLINE_S).values()
            end.setblocking(True)
            member.sendall(b"x")
            assert end.recv(1) == b"x"
            assert end.version() == "TLSv1.3"
            sent = pool.submit(lambda: member.sendall(bytes(1 << 23)) or member.close())
            with end, end.makefile("rb") as stream:
                assert len(stream.read()) == 1 << 23
            sent.result(DEADLINE_S)


def test_a_port_in_use_is_a_refusal():
    with hold_ports(1)[0] as port, listen(split_address(port.address)[1]):
        where, code = refused(lambda: HostLinks(1, {1: port.address}))
        assert (where, code) == ("worker-1", "port-taken")


def test_a_member_that_cannot_be_reached_is_named(monkeypatch):
    monkeypatch.setattr(host_links, "_UNREACHABLE_S", 0.0)
    with two_hosts(PEM()) as (links, ends):
        links[0].close()
        with pytest.raises(ConnectionError, match=f"worker-0 at {links[1]._addresses[0]}"):
            links[1].meet({0}, 1, ends[1], lambda: None)


def of_the_past(pem: str) -> str:
    """Return the key, with a certificate that is not valid today."""
    with tempfile.NamedTemporaryFile("w") as file:
        file.write(pem)
        file.flush()
        words = f"openssl x509 -in {file.name} -signkey {file.name} -days -1"
        signed = subprocess.run(words.split(), capture_output=True, text=True, check=True).stdout
    return pem[: pem.index("-----BEGIN CERTIFICATE")] + signed


def of_a_site(tmp_path, monkeypatch) -> str:
    """Return the certificate on a host whose openssl makes certificates of servers."""
    (tmp_path / "site.cnf").write_text(
        "[req]\ndistinguished_name = dn\nx509_extensions = v3\n"
        "[dn]\n[v3]\nextendedKeyUsage = serverAuth\n"
    )
    monkeypatch.setenv("OPENSSL_CONF", str(tmp_path / "site.cnf"))
    return certificate()


def hear(end: socket.socket) -> None:
    """Raise an error after a message."""
    if select.select([end], [], [], 0)[0]:
        raise InterruptedError


@pytest.mark.parametrize("kind", ["past", "site", "other view"])
def test_only_an_accepted_connection_counts(kind, tmp_path, monkeypatch):
    """The clock and the settings of a site do not matter. The server refuses a member too late."""
    monkeypatch.setattr(host_links, "_UNREACHABLE_S", 0.0)
    pem = of_a_site(tmp_path, monkeypatch)
    pem = of_the_past(pem) if kind == "past" else pem
    with two_hosts(pem) as (links, ends), ThreadPoolExecutor() as pool:
        accepted = pool.submit(links[0].meet, {1}, 1, ends[0], partial(hear, ends[0]))
        try:
            if kind == "other view":
                with pytest.raises(ConnectionError, match="no connection to worker-0"):
                    links[1].meet({0}, 2, ends[1], lambda: None)
                return
            (reached,) = links[1].meet({0}, 1, ends[1], lambda: None).values()
            with reached, accepted.result(DEADLINE_S)[1] as other:
                for one in (reached, other):
                    assert one.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
        finally:
            ends[1].send(b"x")


@pytest.mark.parametrize("limit", ["_MOST_CLIENTS", "_CONNECT_S"])
def test_silent_strangers_are_disconnected(limit, monkeypatch):
    monkeypatch.setattr(host_links, limit, {"_MOST_CLIENTS": 1, "_CONNECT_S": 0.0}[limit])
    with two_hosts(PEM()) as (links, ends), contextlib.ExitStack() as stack:
        address = split_address(links[0]._addresses[0])
        first, _ = (
            stack.enter_context(socket.create_connection(address, DEADLINE_S / 6)) for _ in range(2)
        )
        pool = stack.enter_context(ThreadPoolExecutor())

        accepted = pool.submit(links[0].accept, {1}, 1, ends[0], partial(hear, ends[0]))
        try:
            assert first.recv(1) == b""
        finally:
            ends[1].send(b"x")
        assert isinstance(accepted.exception(DEADLINE_S), InterruptedError)


def test_a_lesson_may_come_before_the_message_that_names_its_teacher():
    with two_hosts(PEM()) as (links, ends), ThreadPoolExecutor() as pool:
        pupil = Mesh(ends[0], 0, ["worker-0", "worker-1", "worker-2"], links[0])
        learnt = pool.submit(pupil._learn, [])  # from worker-2, which is lost
        try:
            with links[1].connect(0, host_links.LESSON, timeout_s=DEADLINE_S / 6) as teacher:
                _send_lesson(teacher, [(7, (0, 1), [np.ones(2)])])
            assert learnt.result(DEADLINE_S)
        finally:
            ends[1].send(b"x")


def job_of(mesh: Mesh) -> jobs.Job:
    return jobs.Job(strategy=None, kind=KINDS["elastic"], ring=mesh, shards=SHARDS)


def test_callback_states_survive_a_chief_lost_while_sharing():
    def program(mesh: Mesh) -> str:
        job = job_of(mesh)
        jobs._made[:] = [job]
        succession = Succession(job)
        earlier = dict(succession.shared)
        state = types.SimpleNamespace(get_state=lambda: "x" * 5000, chief_only=True)
        if job.is_chief:  # it dies within the text
            pieces, send = [], mesh.sum
            mesh.sum = lambda *a, of: os.kill(os.getpid(), 9) if pieces else sent(*a, of=of)

            def sent(*arrays, of):
                pieces.append(of)
                return send(*arrays, of=of)

        succession.share([state], epoch=3, step=7, has_news=True)
        assert succession.shared == earlier
        assert succession.is_due
        mesh.close()
        with pytest.raises(PeerLost):
            succession.share([state], epoch=3, step=7, has_news=True)
        return "done"

    assert Job(2, program).run() == {"done"}


def test_a_successor_waits_until_the_lost_chief_has_exited(monkeypatch, caplog):
    """A chief on a lost host holds the lock of its checkpoints for its grace period."""
    monkeypatch.setattr(resume, "_AGAIN_S", 0.0)
    held = [SecondWriter("backup", "process 7 writes there", fix="wait", code="second-writer")] * 2
    job = types.SimpleNamespace(is_chief=False, name="worker-1", ring=None, config=None)
    backup = Mock(store=None)
    backup.prepare.side_effect = [*held, None, None]
    backup.on_train_begin.side_effect = backup.prepare
    succession = Succession(job)
    job.is_chief = True
    succession.take_over(CallbackList([]), [backup], step=0)
    assert backup.on_train_begin.call_count == 1
    assert "waiting for the lost chief to exit" in caplog.text


def control_sockets():
    """Return the ends of a launcher and a member."""
    return socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)


def show(launcher: socket.socket, epoch: int, members: list[int], fds=(), **go) -> None:
    """Show a view to a member, and let it go on."""
    launcher.send(json.dumps({"view": epoch}).encode())
    usual = {"members": members, "here": members, "done": 0, "source": 0}
    message = {"go": epoch, **usual, "behind": [], "joining": [], **go}
    socket.send_fds(launcher, [json.dumps(message).encode()], list(fds))


@contextlib.contextmanager
def only_member():
    """Yields a launcher's socket, and a mesh with one member."""
    launcher, end = control_sockets()
    with launcher, end:
        show(launcher, 1, [0])
        yield launcher, Mesh(end, 0, ["worker-0"])


def lesson_of(launcher: socket.socket, mesh: Mesh, operations: int) -> list[np.ndarray]:
    """Let the mesh teach while it works, then read the lesson: its results."""
    pupil, teacher = socket.socketpair()
    with pupil:
        with teacher:
            socket.send_fds(launcher, [b'{"teach": 1}'], [teacher.fileno()])
        for _ in range(operations):
            mesh.sum(np.ones(1), of="a step")
        pupil.settimeout(DEADLINE_S)
        return [result for _, _, (result,) in _read_lesson(pupil)]


def test_a_slow_joining_task_gets_values_unchanged_by_the_program(monkeypatch):
    with only_member() as (launcher, mesh):
        monkeypatch.setattr(jobs, "_made", [job_of(mesh)])
        value = np.arange(1_000_000.0)  # more than a socket's buffer
        mine = broadcast(value)
        total = mesh.sum(value, of="values")[0]
        value += 1
        mine += 1
        total += 1
        mesh.begin_loop()
        *_, array, _, summed = lesson_of(launcher, mesh, 3)
        expected = np.arange(1_000_000.0)
        np.testing.assert_array_equal(array.view(np.float64)[:1_000_000], expected)
        np.testing.assert_array_equal(summed, expected)


def test_a_task_that_has_joined_teaches_the_next_one():
    """It keeps what it has learnt, and no result of the loop."""
    launcher, end = control_sockets()
    pupil, teacher = socket.socketpair()
    with launcher, end, pupil, teacher:
        mesh = Mesh(end, 0, ["worker-0"])
        _send_lesson(teacher, [(zlib.crc32(b" [('float64', (1,))]"), (1,), [np.full(1, 7.0)])])
        socket.send_fds(launcher, [b'{"join": 1}'], [pupil.fileno()])
        assert mesh.sum(np.ones(1)) == [7.0]
        assert mesh.begin_loop()
        mesh.go_online()
        show(launcher, 1, [0])
        assert lesson_of(launcher, mesh, 3) == [7.0]


def received(end: socket.socket) -> list[np.ndarray]:
    """Return the arrays that a member has sent."""
    end.settimeout(DEADLINE_S / 6)
    with end.makefile("rb") as stream:
        specs = json.loads(stream.read(int.from_bytes(stream.read(8), "little")))
        arrays = [np.empty(shape, dtype) for dtype, shape in specs]
        for array in arrays:
            stream.readinto(array.reshape(-1).view(np.uint8).data)
    return arrays


def test_a_joined_task_sends_the_last_result():
    """The source of its state may be lost before another member has this result."""
    with ThreadPoolExecutor() as pool, contextlib.ExitStack() as stack:
        launcher, mesh = stack.enter_context(only_member())
        mesh.sum(np.full(1, 7.0), of="a step")
        ours, theirs = map(stack.enter_context, control_sockets())
        joining = Mesh(theirs, 1, ["worker-0", "worker-1", "worker-2"])
        joining.is_offline = True
        admitted = pool.submit(mesh.admit, 1, lambda: [np.full(2, 3.0)])
        joined = pool.submit(joining.join)
        pair = socket.socketpair()
        for to, end in zip((launcher, ours), pair, strict=True):
            with end:
                show(to, 2, [0, 1], [end.fileno()], done=1, joining=[1])
        assert [list(array) for array in joined.result(DEADLINE_S / 6)] == [[3.0, 3.0]]
        admitted.result(DEADLINE_S / 6)
        behind, end = map(stack.enter_context, socket.socketpair())
        show(ours, 3, [1, 2], [end.fileno()], done=1, source=1, behind=[2])
        joining._enter_next()
        assert [list(array) for array in received(behind)] == [[7.0]]
        joining.close()
        mesh.close()


@pytest.mark.parametrize("waits_for", ["state", "lesson", "end"])
def test_a_task_that_waits_to_join_causes_no_hang(waits_for, monkeypatch):
    monkeypatch.setattr(phases, "_state", phases.PhaseState())
    launcher, end = control_sockets()
    pupil, teacher = socket.socketpair()
    with ThreadPoolExecutor() as pool, launcher, end, pupil, teacher:
        mesh = Mesh(end, 2, ["worker-0", "worker-1", "worker-2"])
        mesh.is_offline = waits_for == "state"
        if waits_for == "end":
            _send_lesson(teacher, None)
        socket.send_fds(launcher, [b'{"join": 2}'], [pupil.fileno()])
        waiting = pool.submit(mesh.join if waits_for == "state" else mesh.sum)
        due_s = time.monotonic() + DEADLINE_S / 6
        while phases.current().phase != "join" and time.monotonic() < due_s:
            time.sleep(0.01)
        phase = phases.reported()
        launcher.shutdown(socket.SHUT_RDWR)
        teacher.shutdown(socket.SHUT_RDWR)
        assert isinstance(waiting.exception(DEADLINE_S / 6), ConnectionError)
    assert play(f"3: all sum 120; w1 step 120; w2 {phase}; 30").startswith("120 w1 (w1 w0 w2)")


def test_the_lesson_keeps_a_bounded_number_of_outputs(monkeypatch):
    monkeypatch.setattr(mesh_module, "_MOST_GATHERED_BYTES", 3000)
    with only_member() as (launcher, mesh):
        mesh.sum(np.ones(1000), of="initial values")
        for _ in range(3):
            mesh.gather_shards(lambda shard: [np.ones(30)], SHARDS, of="outputs of a step")
        assert len(mesh._log) == 4
        for _ in range(3):
            mesh.gather_shards(lambda shard: [np.ones(30)], SHARDS, of="outputs of a step")
        assert mesh._log is None
        pupil, teacher = socket.socketpair()
        with pupil:
            with teacher:
                socket.send_fds(launcher, [b'{"teach": 1}'], [teacher.fileno()])
            assert not mesh.begin_loop()
            mesh.sum(np.ones(1), of="a step")
            pupil.settimeout(DEADLINE_S / 6)
            assert _read_lesson(pupil) is None
        assert not mesh.can_admit


def test_a_teacher_connects_again_to_a_task_that_it_cannot_reach(monkeypatch, caplog):
    monkeypatch.setattr(mesh_module, "_LESSON_AGAIN_S", 0.0)
    pupil, teacher = socket.socketpair()
    with only_member() as (launcher, mesh), pupil, teacher:
        failed = OSError("no route to host")
        mesh._links = Mock(connect=Mock(side_effect=[failed, teacher, failed, failed]))
        mesh.begin_loop()
        launcher.send(b'{"teach": 0}')
        mesh.sum(np.ones(1), of="a step")
        pupil.settimeout(DEADLINE_S / 6)
        assert not _read_lesson(pupil)
    assert "no connection to worker-0 (no route to host)" in caplog.text


@pytest.mark.parametrize("call", ["sum", "each", "admit", "begin"])
def test_an_unreachable_member_is_a_lost_peer_in_every_operation(call, monkeypatch):
    """So the worker exits with code 75, without a traceback."""
    with only_member() as (launcher, mesh):
        mesh.sum(np.ones(1), of="a step")
        mesh._links = Mock(meet=Mock(side_effect=ConnectionError("no connection to worker-1")))
        engine = ElasticEngine(job_of(mesh))
        monkeypatch.setattr("tfdist.elastic.engine._Shards", Mock())
        calls = {
            "sum": lambda: engine._total(lambda shard: [np.ones(1)]),
            "each": lambda: engine._each(lambda shard: [np.ones(1)], of="rows"),
            "admit": lambda: engine.admit(1, lambda: None),
            "begin": lambda: engine.begin(None),
        }
        if call == "begin":
            mesh._replay = deque()
        show(launcher, 2, [0, 1], here=[0])
        with pytest.raises(PeerLost, match="no connection to worker-1"):
            calls[call]()


def test_tensorflow_uses_the_memory_of_a_sum():
    (total,) = tree_sum({(s, s + 1): [np.ones(5000, np.float32)] for s in range(3)}, 0, 3)
    tensor = as_tensor(total)
    total[7] = 8.0
    assert tensor[7] == 8.0


def test_tensorflow_copies_memory_that_is_not_aligned():
    array = aligned_like(np.ones(5000, np.float32))[1:]
    array[:] = 3.0
    tensor = as_tensor(array)
    array[7] = 8.0
    assert tensor[7] == 3.0
