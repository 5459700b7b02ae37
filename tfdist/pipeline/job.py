"""Setup of a pipeline job: one device in each task, and connections between the stages."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from tfdist.cluster import KINDS, JobOptions, TaskConfig, settings
from tfdist.strategy import Job, devices, pipeline_setup, rendezvous
from tfdist.strategy.pipeline_setup import PipelineOptions


def pipeline_job(
    config: TaskConfig,
    options: JobOptions,
    *,
    pipeline: PipelineOptions | None,
    **of_other_kinds: Any,
) -> Job:
    """Return the job, with the connections to all tasks and to the neighbouring stages."""
    place, ring = pipeline_setup.join(
        config,
        pipeline or PipelineOptions(),
        timeout_s=options.startup_timeout_s,
        ports=settings.ports_of(config.options),
    )
    if config.options.evaluator and config.task == config.cluster.chief_task:
        rendezvous.answer_until_the_end(config)
    strategy = tf.distribute.OneDeviceStrategy(devices.one_device())
    return Job(strategy=strategy, kind=KINDS["pipeline"], config=config, ring=ring, stages=place)
