"""Flags and options of a pipeline job, and its plan."""

import pytest

from tests.refusals import refusal
from tfdist.cluster import ClusterSpec, JobOptions, job_configs, resolved_strategy
from tfdist.launch.options import parse


@pytest.mark.parametrize(
    ("flags", "workers"),
    [(["--strategy=pipeline", "--stages=2"], 2), (["--stages=2", "--workers=4"], 4)],
)
def test_a_pipeline_has_a_task_for_each_stage(flags, workers):
    options = parse(flags)
    assert (options.strategy, options.stages, options.workers) == ("pipeline", 2, workers)


@pytest.mark.parametrize(
    "flags",
    [
        ["--stages=2", "--strategy=multiworker"],
        ["--stages=2", "--ps=1"],
        ["--stages=2", "--workers=3"],
        ["--stages=2", "--strategy=ps"],
        ["--stages=0"],
    ],
)
def test_stages_that_do_not_go_with_the_rest_are_refused(flags):
    assert refusal(lambda: parse(flags)).where in ("--stages", "--ps")


def test_each_task_is_told_that_it_is_a_stage():
    cluster = ClusterSpec(worker=("a:1", "b:1"))
    options = JobOptions(strategy="pipeline", stages=2)
    configs = list(job_configs(cluster, options=options))
    assert [str(config.task) for config in configs] == ["worker-0", "worker-1"]
    assert {resolved_strategy(config) for config in configs} == {"pipeline"}
