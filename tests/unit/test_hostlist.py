"""Lists of hosts: every form that schedulers and users write, and every mistake."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tfdist.cluster.address import expand_counts, expand_hosts, parse_hosts
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


@pytest.mark.parametrize(("text", "names"), [*AS_SLURM.items(), *OURS.items()])
def test_a_node_list_is_expanded_like_slurm(text, names):
    assert expand_hosts(text, where="X") == names.split()


@given(st.text(alphabet="n1-9[],x 0", max_size=12))
def test_any_text_is_a_host_list_or_refused(text):
    try:
        names = expand_hosts(text, where="X")
    except UsageError:
        return
    assert names
    assert all(name and not set(name) & set("[], ") for name in names)


def test_counts_are_repeated_by_their_factor():
    counts = {"2(x3),1": [2, 2, 2, 1], "16 ": [16], "1,0,3(x1)": [1, 0, 3]}
    assert {text: expand_counts(text, where="X") for text in counts} == counts


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("a", [("a", 1)]),
        ("a:2,b", [("a", 2), ("b", 1)]),
        ("n[1-2]:3,m", [("n1", 3), ("n2", 3), ("m", 1)]),
        ("p-[0-1].svc", [("p-0.svc", 1), ("p-1.svc", 1)]),
        ("10.0.0.1:2,[fd00::1]:3,[::1]", [("10.0.0.1", 2), ("[fd00::1]", 3), ("[::1]", 1)]),
        ("a:2,a:1", [("a", 2), ("a", 1)]),
        (" a , b:2 ", [("a", 1), ("b", 2)]),
    ],
)
def test_a_host_list_gives_the_tasks_of_each_host(text, expected):
    assert parse_hosts(text) == expected
