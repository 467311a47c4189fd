"""The search of tools/tune.py with made-up measurements; what it measures itself needs a GPU."""

import math

import pytest
import torch

pytest.importorskip("triton")

from pylate_fastmaxsim.kernels.runtime import arch
from pylate_fastmaxsim.kernels.winner_backward import launch
from pylate_fastmaxsim.kernels.winner_backward.tiles import QueryGradientTiles
from tools import tune
from tools.tile_search import CANDIDATES, Measured, TuningError, search

ROW = QueryGradientTiles(4, 128, 8, 2)
VALUES = {"block_rows": (1, 2, 4, 8), "unroll": (4, 8, 16), "num_warps": (1, 2, 4)}


class Pretended:
    """A measurement that takes 1 ms at the best tiles and more with every step away from them."""

    def __init__(self, best, wrong=()):
        self.best, self.wrong, self.asked = best, wrong, []

    def __call__(self, tiles):
        self.asked.append(tiles)
        if tiles in self.wrong:
            return Measured(tiles, problem="wrong gradient")
        steps = sum(abs(math.log2(ours / best)) for ours, best in zip(tiles, self.best, strict=True))
        return Measured(tiles, (1.0 + steps, 2.0 + steps))


def test_the_search_finds_the_fastest_and_measures_it_again_after_the_row_of_the_table():
    best = QueryGradientTiles(8, 128, 16, 1)
    measure = Pretended(best)
    found = search(ROW, VALUES, measure, lambda: False)
    assert found.best.tiles == best and found.table.tiles == ROW and found.finished
    assert found.best.relative_to(found.table) < 1
    assert measure.asked[-2:] == [ROW, best]
    assert len({one.tiles for one in found.measured}) == len(found.measured) == len(measure.asked) - 2


def test_what_is_wrong_is_reported_and_never_chosen():
    best = QueryGradientTiles(8, 128, 8, 2)
    found = search(ROW, VALUES, Pretended(best, wrong=[best]), lambda: False)
    assert found.best.tiles != best and found.best.problem is None
    assert [one.problem for one in found.measured if one.tiles == best] == ["wrong gradient"]
    with pytest.raises(TuningError, match="own QueryGradientTiles.* fails on this GPU: wrong gradient"):
        search(ROW, VALUES, Pretended(ROW, wrong=[ROW]), lambda: False)


def test_a_gain_that_does_not_come_again_changes_nothing():
    asked = []

    def measure(tiles):
        asked.append(tiles)
        return Measured(tiles, (1.0 if tiles == ROW or tiles in asked[:-1] else 0.5,))

    found = search(ROW, VALUES, measure, lambda: False)
    assert found.best is found.table and asked[-2] == ROW


def test_the_budget_ends_the_search_with_what_was_found():
    measure = Pretended(QueryGradientTiles(8, 128, 16, 1))
    found = search(ROW, VALUES, measure, lambda: len(measure.asked) >= 4)
    assert not found.finished and len(found.measured) == 4
    assert found.best.tiles == ROW._replace(block_rows=8)


@pytest.mark.parametrize("architecture, dim, dtype", [(90, 128, torch.bfloat16), (80, 1024, torch.float32)])
@pytest.mark.parametrize("family", CANDIDATES)
def test_a_pasted_row_is_the_one_that_training_takes(architecture, dim, dtype, family, monkeypatch):
    monkeypatch.setattr(arch, "architecture", lambda device: architecture)
    tables, kind = tune.tables_of(family), arch.arithmetic(dtype, tune.PRECISION)
    table = getattr(tables, tune.table_name(family, dim, dtype))
    smaller = tune.table_row(family, dim, dtype)._replace(num_warps=1)
    own = table.get((architecture, kind), [])
    monkeypatch.setitem(table, (architecture, kind), [(dim, smaller), *own])
    tiles = getattr(tables, f"{family}_tiles")
    tiles.cache_clear()
    try:
        assert tune.table_row(family, dim, dtype).num_warps == 1
        # Larger vectors still have a row.
        assert tune.table_row(family, 4096, dtype)
    finally:
        tiles.cache_clear()


@pytest.mark.cuda
def test_on_a_gpu_it_prints_a_row_for_every_family(capsys):
    tune.main(["--budget", "20"])
    rows = [line for line in capsys.readouterr().out.splitlines() if not line.startswith("#")]
    assert len(rows) == len(CANDIDATES)
    for row, family in zip(rows, CANDIDATES, strict=True):
        ((dim, tiles),) = eval(row, vars(tune.tables_of(family)))
        assert dim == 128 and type(tiles) is type(tune.table_row(family, 128, torch.bfloat16))


@pytest.mark.cuda
def test_tiles_with_a_wrong_result_are_found_out(monkeypatch):
    case = tune._Case(tune.Shape(8, 32, 16, 100), 128, torch.bfloat16)
    row = tune.table_row("document_gradient", 128, torch.bfloat16)
    assert case.problem("document_gradient", row) is None
    backward = launch.backward
    monkeypatch.setattr(launch, "backward", lambda *args: [g if g is None else 1.1 * g for g in backward(*args)])
    assert case.problem("document_gradient", row).startswith("wrong gradient, off by 0.1")
