"""A ps job in which worker 1 never ends its second piece of work, while worker 0 goes on."""

import collections
import threading
import time

import tfdist
from tfdist.cluster import phases
from tfdist.training.engines.crew import crew_of

crew = crew_of(tfdist.make_strategy(), patience_s=8)
begun = collections.Counter()


def piece(place):
    begun[place.worker_index] += 1
    if (place.worker_index, begun[place.worker_index]) == (1, 2):
        threading.Event().wait()
    time.sleep(0.1)


for step in range(10_000):
    phases.enter("step", step=step)
    crew.submit(piece).result(timeout=60) if step > 1 else crew.submit(piece)
