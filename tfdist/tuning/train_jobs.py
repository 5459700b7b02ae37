"""The trials of `tfdist.tune`, runs of `tfdist.train`: for the chief, and for its runners."""

from __future__ import annotations

from collections.abc import Mapping

from tfdist.launch.machine import Machine
from tfdist.launch.multihost.hosts import environment_of_tasks
from tfdist.tuning import hosts
from tfdist.tuning.conduct import launch_flags, warm_server
from tfdist.tuning.hosts import Meeting
from tfdist.tuning.joined import JoinedRunner
from tfdist.tuning.options import SweepOptions
from tfdist.tuning.runner import LauncherRunner


def runner(
    options: SweepOptions, *, machine: Machine, environ: Mapping[str, str]
) -> LauncherRunner:
    """Returns what runs the trials on this machine."""
    environ = environment_of_tasks(environ)
    return LauncherRunner(
        program=("-m", "tfdist.train", f"--config={options.config}", *options.config_flags),
        launch_flags=launch_flags(options, cpus=machine.cpus),
        gpus=machine.gpus,
        places=options.parallel_trials,
        environ=environ,
        timeout_s=options.trial_timeout_s,
        warm=warm_server(options, machine=machine, environ=environ, modules=["tfdist.app.run"]),
    )


def meeting(options: SweepOptions, environ: Mapping[str, str]) -> Meeting | None:
    """Returns where chief and runners meet; raises UsageError where there is no token."""
    return hosts.meeting_of(
        options,
        environ,
        program=options.config,
        program_file=options.config,
        args=options.config_flags,
    )


def join(options: SweepOptions, *, machine: Machine, environ: Mapping[str, str]) -> int:
    """Runs trials for the chief of a sweep; returns the exit code. Raises as `JoinedRunner.run`."""
    where = meeting(options, environ)
    assert where is not None, "no --join"
    here = runner(options, machine=machine, environ=environ)
    try:
        return JoinedRunner(options, here, meeting=where).run()
    finally:
        here.close()
