"""What the steps of a ps job cost: measured in the step itself, counted in its graph.

phases    times at which the parts of a step are done, noted in the worker's graph
traffic   what crosses between the worker and the ps in a step, counted in the traced graph
account   both, put together by the chief, for each worker
"""

from __future__ import annotations

from tfdist.training.profile.account import PsProfile, profile_of
from tfdist.training.profile.phases import Phases

__all__ = ["Phases", "PsProfile", "profile_of"]
