"""`import tfdist` is cheap, and its names are found on first use."""

import ast
import os
from pathlib import Path

import pytest

import tfdist
from tests.processes import python


def test_a_name_that_is_close_is_hinted_at():
    with pytest.raises(AttributeError, match=r"no attribute 'brodcast' \(did you mean 'broad"):
        tfdist.brodcast  # noqa: B018
    assert not hasattr(tfdist, "nothing_like_it")


def test_dir_and_all_name_everything_public():
    assert set(tfdist.__all__) <= set(dir(tfdist))
    tree = ast.parse(Path(tfdist.__file__).read_text())
    checking = next(node for node in tree.body if isinstance(node, ast.If))
    typed = {alias.name for node in ast.walk(checking) for alias in getattr(node, "names", ())}
    typed -= {"Any"}
    assert typed | {"__version__"} == set(tfdist.__all__)


@pytest.mark.parametrize(
    ("flags", "variables"),
    [(["--no_such_flag"], {}), ([], {"TFDIST_STRATEGY": "ps"}), ([], {"TF_CONFIG": "{"})],
)
def test_the_program_refuses_flags_and_variables_without_tensorflow(flags, variables):
    program = (
        "import sys; from tfdist import train; code = train.main(sys.argv[1:]);"
        "assert not {'tensorflow', 'keras', 'numpy'} & set(sys.modules); sys.exit(code)"
    )
    done = python("-c", program, *flags, env={**os.environ, **variables})
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1), done.stderr
    named = [*flags, *variables][0].strip("-")
    assert done.stderr.startswith("tfdist.train: "), done.stderr
    assert named in done.stderr, done.stderr
