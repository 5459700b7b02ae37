"""A ps job in which worker 1 never ends its second work unit, and worker 0 goes on."""

import collections
import threading
import time

import tfdist
from tfdist import phases
from tfdist.ps.worker_pool import worker_pool_of

pool = worker_pool_of(tfdist.make_strategy(), patience_s=8)
begun = collections.Counter()


def unit(incarnation):
    begun[incarnation.worker_index] += 1
    if (incarnation.worker_index, begun[incarnation.worker_index]) == (1, 2):
        threading.Event().wait()
    time.sleep(0.1)
    return 1


units = []
for step in range(100):
    phases.enter("step", step=step)
    units.append(pool.submit(unit))
    if step >= 2:  # worker 0 goes on meanwhile
        time.sleep(0.1)
print("units done:", sum(unit.result(timeout=300).value for unit in units))
