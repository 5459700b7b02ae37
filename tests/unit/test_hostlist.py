"""Node lists: every form that schedulers write, the order of the names, and every mistake."""

from __future__ import annotations

import re
import time
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tfdist.cluster.hostlist import MAX_HOSTS, compress, expand, expand_counts
from tfdist.errors import UsageError

# What `scontrol show hostnames` of Slurm 22.05 prints for each.
AS_SLURM = {
    "login": "login",
    "n1,n2": "n1 n2",
    "n[1-3,7]": "n1 n2 n3 n7",
    "n[001-003]": "n001 n002 n003",
    "n[08-11]": "n08 n09 n10 n11",
    "n[8-011]": "n8 n9 n10 n11",
    "n[01-1]": "n01",
    "n[98-101]": "n98 n99 n100 n101",
    "n[0-2],n[1-2]": "n0 n1 n2 n1 n2",
    "a[1-2]b[3-4]": "a1b3 a1b4 a2b3 a2b4",
    "n[1-2][3-4]": "n13 n14 n23 n24",
    "rack[0-1]node[09-10]-ib[1-2]": (
        "rack0node09-ib1 rack0node09-ib2 rack1node09-ib1 rack1node09-ib2 "
        "rack0node10-ib1 rack0node10-ib2 rack1node10-ib1 rack1node10-ib2"
    ),
    "a[0-1][0-1][0-1][0-1]": (
        "a0000 a0001 a1000 a1001 a0100 a0101 a1100 a1101 "
        "a0010 a0011 a1010 a1011 a0110 a0111 a1110 a1111"
    ),
    "[1-3]": "1 2 3",
    "n[7],m[08][1]": "n7 m081",
    "n[1-2][3-4][5],m[6]": "n135 n235 n145 n245 m6",  # the first fastest but for the last one
    "n[5][1-2][3-4],m[6],m[6]": "n513 n514 n523 n524 m6 m6",
    "gpu[1-2],node01": "gpu1 gpu2 node01",
}
OURS = {
    "n1,n2,m[1-2]-ib": "n1 n2 m1-ib m2-ib",
    "train-[0-1].svc.ns": "train-0.svc.ns train-1.svc.ns",
    "a[1-2]b[3-4].x": "a1b3.x a1b4.x a2b3.x a2b4.x",
    "a[1-2]b[3].x,a[1-2]b[3],c[1-2]b[3]": "a1b3.x a2b3.x a1b3 a2b3 c1b3 c2b3",
    "n[7]-ib": "n7-ib",
    " n[1-2] ": "n1 n2",
}
WRONG = [
    "",
    ",",
    "n1,",
    ",n1",
    "n1,,n2",
    "n[1-3",
    "n1-3]",
    "n[]",
    "n[7]]",
    "n[7],,m[8]",
    f"n[{'7' * 19}]",
    "n[1,,2]",
    "n[1-]",
    "n[-1]",
    "n[3-1]",
    "n[a-b]",
    "n[1-2-3]",
    "n[1-2]]",
    "n[[1-2]]",
    "n[1[2][3]],m[4-5]",
    "n[[1][2]],m[4],m[5]",
    "n[1 -2]",
    "n1 n2",
    "(n1,n2)",
    "n1\nn2",
    "n[1-2],,n3",
    "n[1-2]n3]",
    "n[1-2],m],o[3]",
    "m,n[1-2],,o[3]",
    "m[1-2],n[1,3-2]",
    "n[٣]",
    f"n[1-{MAX_HOSTS + 1}]",
    f"n[1-{10**30}]",
    "n[1-2000][1-2000]",
    "n[0-1048575],n1,n[1-2]",
]


@pytest.mark.parametrize("text", AS_SLURM)
def test_a_list_is_expanded_as_slurm_expands_it(text: str) -> None:
    assert expand(text, where="X") == AS_SLURM[text].split()


@pytest.mark.parametrize("text", OURS)
def test_text_after_a_bracket_is_part_of_each_name(text: str) -> None:
    assert expand(text, where="X") == OURS[text].split()


@pytest.mark.parametrize("text", WRONG)
def test_what_is_no_node_list_is_one_line_that_names_the_variable(text: str) -> None:
    with pytest.raises(UsageError) as error:
        expand(text, where="SLURM_STEP_NODELIST")
    said = str(error.value)
    assert said.startswith("SLURM_STEP_NODELIST: received ")
    assert said.isprintable()
    assert len(said) < 400


@pytest.mark.parametrize("text", ["n[1-3", "n1-3]", "n[[1-2]]", "n[1-2],m[3"])
def test_brackets_that_do_not_pair_are_shown_with_the_list(text: str) -> None:
    with pytest.raises(UsageError, match="expected a node list with brackets in pairs") as error:
        expand(text, where="X")
    assert repr(text) in str(error.value)


NAMES = st.lists(st.from_regex(r"[a-z]{0,2}-?[0-9]{0,4}([a-z.-]|[0-9]{1,3})", fullmatch=True))


@given(NAMES.filter(bool))
def test_what_is_compressed_expands_to_the_same_names_in_the_same_order(names: list[str]) -> None:
    assert expand(compress(names), where="X") == names


@given(st.sampled_from(["n", "rack1-", "x0y"]), st.integers(0, 3000), st.integers(2, 300))
def test_a_run_of_names_is_compressed_to_one_range(prefix: str, first: int, count: int) -> None:
    last = first + count - 1
    plain = [f"{prefix}{number}" for number in range(first, last + 1)]
    assert compress(plain) == f"{prefix}[{first}-{last}]"
    padded = [f"{prefix}{number:06d}" for number in range(first, last + 1)]
    assert compress(padded) == f"{prefix}[{first:06d}-{last:06d}]"


def brackets() -> st.SearchStrategy[tuple[str, list[str]]]:
    def one(part: tuple[int, int, int]) -> tuple[str, list[str]]:
        low, more, width = part
        text = f"{low:0{width}d}-{low + more}" if more else f"{low:0{width}d}"
        return text, [f"{n:0{width}d}" for n in range(low, low + more + 1)]

    part = st.tuples(st.integers(0, 120), st.integers(0, 12), st.integers(1, 4)).map(one)
    return st.lists(part, min_size=1, max_size=3).map(
        lambda parts: (
            "[" + ",".join(text for text, _ in parts) + "]",
            [number for _, numbers in parts for number in numbers],
        )
    )


@given(st.lists(st.tuples(brackets(), brackets()), min_size=1, max_size=4))
def test_two_brackets_are_every_pair_with_the_last_fastest(
    elements: list[tuple[tuple[str, list[str]], tuple[str, list[str]]]],
) -> None:
    text = ",".join(f"a{one}b{two}" for (one, _), (two, _) in elements)
    expected = [f"a{i}b{j}" for (_, one), (_, two) in elements for i in one for j in two]
    assert expand(text, where="X") == expected


PLAIN = st.sampled_from(["login", "n7", "x09"])
BRACKETED = brackets().map(lambda made: (f"a{made[0]}", [f"a{number}" for number in made[1]]))
ELEMENTS = st.lists(st.one_of(PLAIN.map(lambda name: (name, [name])), BRACKETED), min_size=1)


@given(ELEMENTS, st.sampled_from(["", "-ib"]))
def test_brackets_and_names_without_may_alternate(
    elements: list[tuple[str, list[str]]], suffix: str
) -> None:
    text = ",".join(element + suffix for element, _ in elements)
    assert expand(text, where="X") == [name + suffix for _, names in elements for name in names]


@given(st.text(alphabet="n1-9[],x 0", max_size=12))
def test_any_text_is_expanded_to_names_or_refused(text: str) -> None:
    try:
        names = expand(text, where="X")
    except UsageError:
        return
    assert names
    assert all(name and not set(name) & set("[], ") for name in names)


def test_the_nodes_of_the_largest_machines_are_expanded() -> None:
    names = expand("frontier[00001-09856],n[1-160000]", where="X")
    assert len(names) == 9_856 + 160_000
    assert (names[0], names[9_855], names[-1]) == ("frontier00001", "frontier09856", "n160000")
    assert compress(names) == "frontier[00001-09856],n[1-160000]"


HOLES = ",".join(f"{first}-{first + 1}" for first in range(1, 158_976, 3))
LARGE = {
    "one range": ("n[1-158976]", 158_976),
    "zeros": ("n[000001-158976]", 158_976),
    "racks": ("rack[1-432]node[001-368]", 158_976),
    "every third one missing": (f"n[{HOLES}]", 105_984),
    "that with zeros": (f"n[{re.sub('[0-9]+', lambda found: found[0].zfill(6), HOLES)}]", 105_984),
    "racks with holes": (
        ",".join(f"r{rack}n[1-90,92-181,183,184]" for rack in range(864)),
        157_248,
    ),
    "racks with numbers of their own": (
        ",".join(f"r{rack}n[{16 * rack}-{16 * rack + 15}]" for rack in range(9_936)),
        158_976,
    ),
    "that with zeros and single nodes between": (
        ",".join(
            f"c{number:05d}n[{15 * number:06d}-{15 * number + 14:06d}],s{number}"
            for number in range(9_936)
        ),
        158_976,
    ),
    "a chassis of eight nodes each": (
        ",".join(f"r{rack}n[{8 * rack}-{8 * rack + 7}]" for rack in range(19_872)),
        158_976,
    ),
    "twenty thousand racks": (",".join(f"r{rack}n[1-8]-ib" for rack in range(19_872)), 158_976),
    "two brackets a name": (",".join(f"r{r}s[1-2]n[1-4]" for r in range(19_872)), 158_976),
    "three brackets a name": (
        ",".join(f"x{row}c[0-7]s[0-7]n[0-1]" for row in range(1_242)),
        158_976,
    ),
    "two brackets of one number, and ranges once": (
        ",".join(f"x[{n // 100}]n[{n}]" for n in range(19_872)) + ",y[1-2]n[3-4]",
        19_876,
    ),
    "brackets of one number between those of ranges": (
        ",".join(f"x{n}n[{n}]" if n % 10 else f"x{n}n[{n}-{n + 1}]-ib" for n in range(19_872)),
        21_860,
    ),
    "a bracket for each node": (",".join(f"n[{number}]" for number in range(158_976)), 158_976),
    "no ranges": (",".join(f"n{number}" for number in range(158_976)), 158_976),
}


@pytest.mark.parametrize("form", LARGE)
def test_a_list_of_the_nodes_of_the_largest_machine_takes_less_than_50_ms(form: str) -> None:
    text, count = LARGE[form]  # Fugaku has 158,976 nodes, the most of the TOP500
    assert len(expand(text, where="X")) == count

    def is_expanded_within(limit_s: float) -> bool:
        return any(timed(lambda: expand(text, where="X")) < limit_s for _ in range(20))

    def names_s() -> float:
        """What it takes to write the names alone; on a slow machine the measure."""
        return min(timed(lambda: [f"n{number:06}" for number in range(count)]) for _ in range(20))

    assert is_expanded_within(0.05) or is_expanded_within(2 * names_s())


def timed(work: Callable[[], object]) -> float:
    start_s = time.process_time()  # of this process alone, however busy the machine is
    work()
    return time.process_time() - start_s


def test_counts_are_repeated_as_often_as_they_say() -> None:
    assert expand_counts("2(x3),1", where="X") == [2, 2, 2, 1]
    assert expand_counts("16", where="X") == [16]
    assert expand_counts("1,0,3(x1)", where="X") == [1, 0, 3]


@pytest.mark.parametrize("text", ["", "2(3)", "2(x0)", "x", "-1", "2,,1", "2(x99999999)", "1 "])
def test_what_is_no_list_of_counts_is_refused(text: str) -> None:
    if text == "1 ":
        assert expand_counts(text, where="X") == [1]
        return
    with pytest.raises(UsageError, match=r"^SLURM_STEP_TASKS_PER_NODE: received "):
        expand_counts(text, where="SLURM_STEP_TASKS_PER_NODE")


def test_too_many_names_are_refused_before_they_are_made() -> None:
    for text in (f"n[0-{10**17}]", f"n[1-{MAX_HOSTS + 1}]"):
        with pytest.raises(UsageError, match="at most 1048576 names"):
            expand(text, where="X")
