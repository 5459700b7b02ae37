"""The plan of a job: which processes, in which environment, on which part of the machine."""

import errno
import fcntl
import json
import os
import shlex
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from tests.processes import script
from tests.refusals import refusal
from tfdist.cluster import decode
from tfdist.cluster import ports as held_ports
from tfdist.cluster.ports import PortPool
from tfdist.errors import TfdistError
from tfdist.launch.job_run import run_job
from tfdist.launch.machine import Machine, listed_gpus, this_machine, visible_gpus
from tfdist.launch.options import parse
from tfdist.launch.plan import JobDescription, decided_kind, render, start_method
from tfdist.launch.run_dir import RunDir, chosen_run_dir, description_of_job


def planned(line, *, cpus=2, gpus=(), environ=None, machine=None):
    """Returns {task name: process} for a command line."""
    options = parse([*line.split(), "train.py"])
    machine = machine or Machine(cpus=cpus, gpus=tuple(gpus))
    kind = decided_kind(options, machine)
    job = JobDescription(
        options=options,
        kind=kind,
        machine=machine,
        environ=environ or {"PATH": "/bin"},
        python="/usr/bin/python",
        run_dir=Path("/runs/a b"),
    )
    addresses = [f"127.0.0.1:{5000 + number}" for number in range(job.num_local_addresses)]
    specs = job.specs(job.local_attempt(addresses, number=3))
    return {str(spec.task): spec for spec in specs}


def values(specs, name):
    return {task: spec.env.get(name) for task, spec in specs.items()}


@pytest.mark.parametrize(
    ("line", "is_claimed"),
    [
        *(("", False), ("--strategy multiworker", False), ("--workers 2 --independent", False)),
        *(("--workers 2", True), ("--ps 1", True), ("--strategy multiworker --evaluator", True)),
    ],
)
def test_tasks_get_a_claim_for_training_alone(line, is_claimed):
    claim = "/runs/a b/logs/attempt-3/trains-alone" if is_claimed else ""
    assert {spec.claim for spec in planned(line).values()} == {claim}


@pytest.mark.parametrize(
    ("line", "gpus", "strategy", "tasks"),
    [
        ("", "", "single", "worker-0"),
        ("", "0", "single", "worker-0"),
        ("", "01", "mirrored", "worker-0"),
        ("--devices_per_worker 2", "", "mirrored", "worker-0"),
        ("--devices_per_worker 1", "01", "single", "worker-0"),
        ("--workers 3", "", "multiworker", "worker-0 worker-1 worker-2"),
        ("--workers 2 --devices_per_worker 2", "", "multiworker", "worker-0 worker-1"),
        ("--ps 2 --workers 2", "", "ps", "chief-0 worker-0 worker-1 ps-0 ps-1"),
        ("--ps 1 --evaluator", "", "ps", "chief-0 worker-0 ps-0 evaluator-0"),
        ("--strategy ps", "", "ps", "chief-0 worker-0 ps-0"),
        ("--strategy multiworker", "", "multiworker", "worker-0"),
        ("--strategy mirrored", "", "mirrored", "worker-0"),
        ("--stages 2", "", "pipeline", "worker-0 worker-1"),
        ("--workers 2 --evaluator", "", "multiworker", "worker-0 worker-1 evaluator-0"),
    ],
)
def test_numbers_of_tasks_decide_the_strategy_and_order(line, gpus, strategy, tasks):
    machine = Machine(cpus=2, gpus=tuple(gpus))
    assert decided_kind(parse(line.split()), machine).name == strategy
    assert list(planned(line, machine=machine)) == tasks.split()


def test_each_task_gets_its_part_of_the_cluster():
    line = "--ps 1 --workers 2 --threads_per_task 3 --startup_timeout_s 7"
    specs = planned(f"{line} --split_bytes 4096 --ports 20000-20100")
    configs = {name: decode(spec.env["TF_CONFIG"]) for name, spec in specs.items()}
    assert [str(config.task) for config in configs.values()] == list(specs)
    assert len({config.cluster for config in configs.values()}) == 1
    (options,) = {config.options for config in configs.values()}
    assert (options.strategy, options.run_dir, options.attempt) == ("ps", "/runs/a b", 3)
    assert (options.startup_timeout_s, options.threads_per_task) == (7, 3)
    assert (options.split_bytes, options.ports) == (4096, "20000-20100")
    assert all("TFDIST_PORTS" not in spec.env for spec in specs.values())


def test_the_evaluator_gets_cpus_but_no_gpu():
    specs = planned("--ps 1 --workers 2 --evaluator", cpus=8, gpus=("0", "1"))
    configs = {name: decode(spec.env["TF_CONFIG"]) for name, spec in specs.items()}
    assert all(config.options.evaluator for config in configs.values())
    seen = {name for name, config in configs.items() if "evaluator" in config.cluster.as_dict()}
    assert seen == {"evaluator-0"}
    assert values(specs, "CUDA_VISIBLE_DEVICES")["evaluator-0"] == "-1"
    assert set(values(specs, "TF_NUM_INTRAOP_THREADS").values()) == {"2"}


SECRETS = [
    "--api_key=abc --wandb_key abc --auth=abc --pwd -abc -password=abc --pw abc",
    "hf_abcdefghijkl --store=s3://me:abc@host/?a=b",
    "mysql://host?password=abc",
    "--header 'Authorization: Bearer abc' --header='Authorization: Basic abc'",
    "--client-secret abc",
    "-H 'X-Api-Key: abc' -H 'Cookie: a=abc' 'bearer abcabcabc'",
    "--url https://h/?token=abc https://h/?a=1&access_token=abc --to=https://h/a?X-Amz-Signature=abc",
    "--sas 'sv=2022&sig=abc' 'https://h/b?sv=2022&sr=b&sig=abc' 'a=sb://h/;SharedAccessKey=abc'",
    "--storage='AccountName=me;AccountKey=abc==' --dsn 'host=h password=abc' 'pwd: abc'",
    """'{"api_key": "abc"}' '{"a": {"clientSecret":"abc"}}' --opts='{"pw": "abc"}'""",
    """"{'token': 'abc'}" '{"a": 1, "password" : "abc"}'""",
    "--env WANDB_API_KEY=abc --env=WANDB_API_KEY=abc --set=hub.token=abc MLFLOW_TRACKING_TOKEN=abc",
    "--id eyJhbGciOiJI.eyJabcdefgh.abc_abc --id=eyJhbGciOiJI.eyJabcdefgh.abc",
    "bash -c 'train --token abc' AIzaabcabcabcabc ASIAABCABCABCABCabc",
]


@pytest.mark.parametrize("words", SECRETS)
def test_secrets_of_the_command_are_hidden(words):
    secrets = shlex.split(words)
    usual = ["--lr=1", "--auth", "--keys=2", "--monkey", "3", "https://a.b/c", "-params", "--u=a:b"]
    usual += ["--max_tokens=512", "--passes", "2", "--design=12:30", "--monkey='{\"keys\": 1}'"]
    argv = ("python", "train.py", *secrets, *usual)
    spec = planned("--workers 2", environ={"AWS_SECRET": "abc"})["worker-1"]
    for text in (
        render([replace(spec, argv=argv)]),
        description_of_job("single", argv=argv)["command"],
    ):
        assert "abc" not in text.lower()
        assert text.endswith(shlex.join(usual))


@pytest.mark.parametrize(
    ("line", "cpus", "share"),
    [
        ("", 8, "8"),
        ("--workers 2", 8, "4"),
        ("--workers 3", 8, "2"),
        ("--workers 4", 2, "1"),
        ("--ps 1 --workers 3", 8, "2"),
    ],
)
def test_cpus_are_divided_among_the_tasks_that_compute(line, cpus, share):
    specs = planned(line, cpus=cpus)
    assert set(values(specs, "TF_NUM_INTRAOP_THREADS").values()) == {share}
    assert set(values(specs, "OMP_NUM_THREADS").values()) == {share}


@pytest.mark.parametrize(
    ("line", "own", "task", "name", "value"),
    [
        # A thread for each worker that chief and ps may wait for.
        ("--ps 1 --workers 4", {}, "chief-0", "TF_NUM_INTEROP_THREADS", "6"),
        ("--ps 1 --workers 4", {}, "ps-0", "TF_NUM_INTEROP_THREADS", "6"),
        ("--ps 1 --workers 4", {}, "worker-0", "TF_NUM_INTEROP_THREADS", "2"),
        # A flag goes before the user's environment, and what logs need, too.
        (
            *("--threads_per_task 3", {"TF_NUM_INTRAOP_THREADS": "7"}),
            *("worker-0", "TF_NUM_INTRAOP_THREADS", "3"),
        ),
        ("", {"PYTHONUNBUFFERED": ""}, "worker-0", "PYTHONUNBUFFERED", "1"),
        # Calls wait for a task that restarts in a ps job alone.
        ("--ps 1", {}, "worker-0", "GRPC_FAIL_FAST", "use_caller"),
        ("--workers 2", {}, "worker-0", "GRPC_FAIL_FAST", None),
        # No proxy is between the tasks.
        ("--workers 2", {}, "worker-0", "no_proxy", "localhost,127.0.0.1,::1"),
        ("--workers 2", {}, "worker-0", "NO_PROXY", "localhost,127.0.0.1,::1"),
        ("", {"no_proxy": "a.b, localhost"}, "worker-0", "no_proxy", "a.b,localhost,127.0.0.1,::1"),
        ("", {"NO_PROXY": "a.b"}, "worker-0", "no_proxy", "a.b,localhost,127.0.0.1,::1"),
        ("", {"no_grpc_proxy": "c"}, "worker-0", "no_grpc_proxy", "c,localhost,127.0.0.1,::1"),
        ("", {}, "worker-0", "no_grpc_proxy", None),
    ],
)
def test_a_task_gets_its_environment_variables(line, own, task, name, value):
    assert planned(line, cpus=2, environ=own)[task].env.get(name) == value


def test_settings_of_the_user_have_priority():
    own = {
        "TF_NUM_INTRAOP_THREADS": "7",
        "TF_NUM_INTEROP_THREADS": "9",
        "OMP_NUM_THREADS": "5",
        "GRPC_FAIL_FAST": "false",
        "TF_CPP_MIN_LOG_LEVEL": "0",
        "PYTHONFAULTHANDLER": "",
        "GLIBC_TUNABLES": "glibc.malloc.perturb=1",
    }
    spec = planned("--ps 1", environ=own)["chief-0"]
    assert {name: spec.env[name] for name in own} == own
    assert not set(own) & set(spec.added)


# GPUs


@pytest.mark.parametrize(
    ("line", "gpus", "visible"),
    [
        ("--workers 2", "0123", {"worker-0": "0,1", "worker-1": "2,3"}),
        ("--workers 2 --devices_per_worker 1", "0123", {"worker-0": "0", "worker-1": "1"}),
        ("--workers 3", "0123", {"worker-0": "0", "worker-1": "1", "worker-2": "2"}),
        ("--strategy single", "01", {"worker-0": "0,1"}),  # for a placement
        ("--strategy single --devices_per_worker 1", "01", {"worker-0": "0"}),
        ("--stages 2", "0123", {"worker-0": "0", "worker-1": "1"}),
        ("--strategy mirrored", "01", {"worker-0": "0,1"}),
        ("--devices_per_worker 2", "0123", {"worker-0": "0,1"}),
        ("--ps 1", "01", {"chief-0": "-1", "worker-0": "0", "ps-0": "-1"}),
        (
            "--ps 1 --workers 3",
            "01",
            {"chief-0": "-1", "worker-0": "0", "worker-1": "1", "worker-2": "0", "ps-0": "-1"},
        ),
        ("--workers 2", "", {"worker-0": "-1", "worker-1": "-1"}),
        ("--elastic --workers 2", "0", {"worker-0": "-1", "worker-1": "-1"}),
    ],
)
def test_gpus_are_divided_among_the_workers(line, gpus, visible):
    assert values(planned(line, gpus=gpus), "CUDA_VISIBLE_DEVICES") == visible


def test_an_unknown_gpu_is_left_to_tensorflow():
    machine = Machine(cpus=2, has_gpu_driver=True)
    assert "CUDA_VISIBLE_DEVICES" not in planned("", machine=machine)["worker-0"].env


@pytest.mark.parametrize(
    ("flag", "machine", "imports", "method"),
    [
        ("auto", Machine(cpus=2), True, "fork"),
        ("auto", Machine(cpus=2), False, "exec"),
        ("auto", Machine(cpus=2, has_gpu_driver=True), True, "exec"),
        ("auto", Machine(cpus=2, gpus=("0",)), True, "exec"),
        ("exec", Machine(cpus=2), True, "exec"),
        ("fork", Machine(cpus=2, gpus=("0",)), False, "fork"),
    ],
)
def test_tensorflow_programs_are_forked_without_a_gpu(flag, machine, imports, method):
    options = parse([f"--start={flag}"])
    assert start_method(options, machine, imports_tensorflow=imports) == method


@pytest.mark.parametrize(
    ("value", "gpus"),
    [
        *[("", ()), ("-1", ()), ("NoDevFiles", ()), ("none", ())],
        *[("0,2", ("0", "2")), ("1,-1,2", ("1",)), ("GPU-ab, 3", ("GPU-ab", "3"))],
    ],
)
def test_visible_gpus_are_read_as_cuda_reads_them(value, gpus):
    assert visible_gpus(value) == gpus


def test_a_driver_that_hangs_is_not_waited_for(tmp_path, monkeypatch):
    """Its nvidia-smi is in the kernel, and hears no signal."""
    script(tmp_path / "nvidia-smi", "exec sleep 1000")
    monkeypatch.setattr("tfdist.launch.machine._NVIDIA_SMI_TIMEOUT_S", 0.1)
    deaf: list[subprocess.Popen[str]] = []
    with monkeypatch.context() as patch:
        patch.setattr(subprocess.Popen, "kill", lambda process: deaf.append(process))
        assert this_machine({"PATH": f"{tmp_path}:{os.environ['PATH']}"}).gpus == ()
    (process,) = deaf
    process.kill()
    process.communicate()


def test_parts_of_a_gpu_are_separate_devices():
    text = (
        "GPU 0: NVIDIA A100-SXM4-40GB (UUID: GPU-5d5ba0d6)\n"
        "  MIG 3g.20gb     Device  0: (UUID: MIG-c6d4f1ef)\n"
        "  MIG 2g.10gb     Device  1: (UUID: MIG-cba663e8)\n"
        "GPU 1: NVIDIA A100-SXM4-40GB (UUID: GPU-a9c1b2d3)\n"
    )
    assert listed_gpus(text) == ("MIG-c6d4f1ef", "MIG-cba663e8", "1")
    assert listed_gpus("No devices found.\n") == ()


# the dry run


def test_the_plan_is_printed_as_commands_for_a_shell():
    specs = planned("--workers 2")
    first, second = render(list(specs.values())).split("\n\n")
    assert first.startswith("# worker-0\n")
    words = shlex.split(second.replace(" \\\n", " "), comments=True)
    assert words[-2:] == ["/usr/bin/python", "train.py"]
    given = dict(word.split("=", 1) for word in words[:-2])
    assert given["TF_CONFIG"] == specs["worker-1"].env["TF_CONFIG"]
    assert given.keys() == set(specs["worker-1"].added)


# the ports


class Port:
    """A held port whose number somebody else may have taken all the same."""

    def __init__(self, number):
        self.address = f"127.0.0.1:{number}"
        self.is_held = True

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.is_held = False


def test_ports_taken_before_the_start_are_replaced(monkeypatch):
    drawn = [Port(number) for number in (1, 2, 3, 4, 5)]
    taken = {"127.0.0.1:2", "127.0.0.1:4"}
    monkeypatch.setattr(held_ports, "hold_ports", lambda n, **how: [drawn.pop(0) for _ in range(n)])
    monkeypatch.setattr(held_ports, "is_port_free", lambda address: address not in taken)
    with PortPool(3) as pool:
        ports = pool.renewed()
        assert [port.address for port in ports] == [f"127.0.0.1:{n}" for n in (1, 5, 3)]
        assert all(port.is_held for port in ports)
    assert not ports[1].is_held


# the run directory


def test_the_run_directory_is_absolute_and_new_unless_given(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert chosen_run_dir("x/../y z", {"SLURM_JOB_ID": "7"}) == tmp_path / "y z"
    assert chosen_run_dir(None, {}).parent == tmp_path / "runs"
    assert chosen_run_dir(None, {}) != chosen_run_dir(None, {})
    assert chosen_run_dir(None, {"SLURM_JOB_ID": "7"}).name.startswith("slurm-7-")


@pytest.mark.parametrize(("number", "code"), [(errno.ENOLCK, 2), (errno.ENOSPC, 1)])
def test_a_file_system_error_is_not_another_job(tmp_path, monkeypatch, number, code):
    def refuse(descriptor, operation):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(fcntl, "flock", refuse)
    with pytest.raises(TfdistError, match=f"^--run_dir.*{os.strerror(number)}") as raised:
        RunDir(tmp_path)
    assert raised.value.exit_code == code


# TF_CONFIG in the launcher's own environment


def told(cluster, type_="worker", **more):
    return {
        "TF_CONFIG": json.dumps({"cluster": cluster, "task": {"type": type_, "index": 0}})
    } | more


SEVERAL = {"worker": ["a:1", "b:1"]}


@pytest.mark.parametrize(
    ("environ", "task"),
    [
        (told(SEVERAL), "worker-0 of a job with 2 tasks, but the launcher"),
        (told(SEVERAL, "evaluator"), "evaluator-0 of a job with 3 tasks"),
        (told({"worker": ["a:1"], "evaluator": ["b:1"]}), "worker-0 of a job with 2 tasks"),
        (told(SEVERAL, TFDIST_CLUSTER="tf_config"), "worker-0 of a job with 2 tasks"),
    ],
)
def test_a_launcher_inside_a_task_is_refused(environ, task):
    line = ["--dry_run", "--strategy=single", "-m", "this"]
    error = refusal(lambda: run_job(parse(line), environ=environ))
    assert (error.where, error.code) == ("TF_CONFIG", "nested-launcher")
    assert error.problem.startswith(f"this process is {task}")


UNUSED = {"TFDIST_PORTS": "20000-20100", "TFDIST_RESTARTS": "1", "TFDIST_CLUSTER": "none"} | {
    "TFDIST_HOSTS": "a,b",
    "TFDIST_STRATEGY": "ps",
    "TFDIST_RUN_DIR": " ",
}  # TFDIST_RESTARTS and TFDIST_CLUSTER are read
SAID = {
    "TF_CONFIG: ignored": [
        told({"worker": ["a:1"]}),
        told({}),
        told(SEVERAL, _TFDIST_JOB="mark"),  # a launcher inside a task of another
        {"TF_CONFIG": "no JSON"},
    ],
    "TFDIST_STRATEGY, TFDIST_PORTS, TFDIST_HOSTS: ignored, because the launcher reads": [UNUSED],
    "": [
        *({}, {"TF_CONFIG": " "}, {"_TFDIST_JOB": "x"}),
        told(SEVERAL, TFDIST_CLUSTER="none"),
    ],
}


@pytest.mark.parametrize(
    ("said", "environ"), [(said, environ) for said, listed in SAID.items() for environ in listed]
)
def test_unused_environment_variables_are_named_in_one_line(said, environ, capsys):
    assert run_job(parse(["--dry_run", "--strategy=single", "-m", "this"]), environ=environ) == 0
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == bool(said)
    assert all(said in line for line in lines)
