"""The cells of the conformance table in an elastic job of one worker with three shards."""

import dataclasses

import pytest

from tests.integration import test_conformance as table
from tests.refusals import refused
from tfdist.elastic.job import ElasticStrategy
from tfdist.kinds import KINDS
from tfdist.strategy import job as jobs

class Strategies(dict):
    """The strategies by their number of replicas, with an elastic job in place of 3."""

    def __getitem__(self, number):
        if number != 3:
            jobs._made.clear()
            return super().__getitem__(number)
        strategy = ElasticStrategy("/CPU:0", 3)
        jobs.remember(jobs.Job(strategy=strategy, kind=KINDS["elastic"], shards=3))
        return strategy


@pytest.fixture
def elastic(strategies, monkeypatch):
    monkeypatch.setattr(jobs, "_made", [])
    return Strategies(strategies)


REFUSED = {}
"""Codes of the cells that an elastic job refuses (see docs/elastic.md)."""


@pytest.mark.parametrize("cell", [c for c in table.CELLS if c not in REFUSED])
def test_shards_end_alike(elastic, cell):
    table.require_alike(elastic, dataclasses.replace(table.CELLS[cell], replicas=(3,)))


@pytest.mark.parametrize("cell", REFUSED)
def test_other_cells_are_refused(elastic, cell):
    one = dataclasses.replace(table.CELLS[cell], replicas=(3,))
    assert refused(lambda: table.require_alike(elastic, one))[1] == REFUSED[cell]
