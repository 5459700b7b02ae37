"""A model that does not fit into the memory of one process trains on two stages."""

import pytest

from tests.multiprocess.memory_limit import limited_groups
from tests.multiprocess.trainings import PROGRAMS, ended
from tests.multiprocess.warm import executed
from tfdist.errors import EXIT_OK

pytestmark = pytest.mark.slow

LIMIT_BYTES = 1040 * 2**20  # one process takes 1190 MiB, the chief of two 920
DEADLINE_S = 250


def run(out, groups, *, stages):
    paths = ":".join(str(group.path) for group in groups)
    words = ("--strategy=pipeline", f"--stages={stages}")
    code, said = ended(
        out / str(stages),
        *(*words, str(PROGRAMS / "large_model.py"), *["cut"] * (stages > 1)),
        GROUPS=paths,
        timeout_s=DEADLINE_S,
        start=executed,
    )
    peaks = [group.peak_bytes >> 20 for group in groups]
    return code, f"peaks {peaks} MiB, kills {[group.kills for group in groups]}\n{said}"


def test_a_model_that_does_not_fit_one_process_trains_on_two_stages(tmp_path):
    with limited_groups(1, limit_bytes=LIMIT_BYTES) as groups:
        code, said = run(tmp_path, groups, stages=1)
        assert code != EXIT_OK, said
        assert groups[0].kills == 1, said
    with limited_groups(2, limit_bytes=LIMIT_BYTES) as groups:
        code, said = run(tmp_path, groups, stages=2)
        assert code == EXIT_OK, said
        assert said.count("trained") == 2, said
        assert not any(group.kills for group in groups), said
