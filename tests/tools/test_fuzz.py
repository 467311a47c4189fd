"""The random sweep of tools/fuzz.py: it is clean, repeats itself, and reports a fault that is planted."""

import pytest

from tools import fuzz
from tools.fuzz_hosts import HOSTS

# The first seed of each host, and how many: each takes a third of a second.
SEEDS = {"pylate": (0, 20), "multi_vector": (0, 25), "sparse": (0, 20), "colpali": (0, 40)}
# What each host needs.
MODULES = {
    "pylate": "pylate",
    "multi_vector": "sentence_transformers.multi_vector_encoder",
    "sparse": "sentence_transformers",
    "colpali": "colpali_engine",
}


def host(name: str) -> fuzz.Host:
    pytest.importorskip(MODULES[name])
    return HOSTS[name]


@pytest.mark.e2e
@pytest.mark.parametrize("name", SEEDS)
def test_no_difference_is_unexplained(name):
    first, count = SEEDS[name]
    verdicts = fuzz.sweep(host(name), range(first, first + count))
    assert not fuzz.unexplained(verdicts), "\n".join(map(str, fuzz.unexplained(verdicts)))
    # Most are compared: stock takes nearly all that is drawn.
    assert sum(verdict.stock.error is None for verdict in verdicts) > 0.8 * count


def test_a_planted_fault_is_reported_each_time_alike(monkeypatch, capsys):
    colpali = host("colpali")
    from pylate_fastmaxsim.integrations.colpali import losses

    assert not fuzz.unexplained(fuzz.sweep(colpali, range(4)))
    monkeypatch.setattr(
        losses, "pooled_scores", lambda *args, scored=losses.pooled_scores, **given: scored(*args, **given) * (1 + 1e-6)
    )
    first, second = ([str(each) for each in fuzz.unexplained(fuzz.sweep(colpali, range(4)))] for _ in range(2))
    assert first and first == second
    assert capsys.readouterr().out.splitlines() == [*first, *second]
    assert fuzz.main(["colpali", "--only", first[0].removeprefix("seed ").partition(":")[0]]) == 1
    assert "no reason found" in capsys.readouterr().out
