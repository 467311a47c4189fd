"""The benchmark of attention: which tiles it tries, and what its tables say."""

from benchmarks.operators.attention_sweep import HEADS, LENGTHS, fastest, trials

from benchmarks.operators.attention import heads_table, rotary_table
from pylate_fastmaxsim.kernels.attention import launch


def test_each_length_has_a_choice_that_holds_its_texts():
    for dim in HEADS:
        found = trials(dim, 0.1)
        for part in ("forward", "backward"):
            for length in LENGTHS:
                tried = [trial for trial in found if (trial.part, trial.length) == (part, length)]
                assert len(tried) > 1 and all(trial.divided or trial.tile.block >= length for trial in tried)


def test_the_tables_of_the_kernels_are_among_the_choices():
    tried = {(trial.part, trial.tile, trial.divided) for trial in trials(64, 0.0)}
    for part, table in (("forward", launch.FORWARD), ("backward", launch.BACKWARD)):
        for tiles in table.values():
            assert {(part, tile, False) for tile in tiles.short} | {(part, tiles.long, True)} <= tried


def test_the_fastest_of_those_that_ran():
    timed = [trial._asdict() for trial in trials(64, 0.0) if (trial.part, trial.length) == ("backward", 64)]
    for trial, ms in zip(timed, (3.0, 1.0, 2.0), strict=False):
        trial["ms"] = ms
    assert fastest(timed) == {"backward, heads of 64, dropout 0.0, texts of 64": timed[1]}


def test_tables():
    def row(*ways):
        return {way: {"forward": {"ms": i + 1.0}, "backward": {"ms": 2.0}} for i, way in enumerate(ways)}

    names = [
        f"{texts}, 12 heads of 32, dropout {dropout}"
        for dropout in (0.0, 0.1)
        for texts in ("1 query, 2 texts", "long")
    ]
    heads = heads_table(dict.fromkeys(names, row("flash", "ours"))).splitlines()
    assert heads[0] == "| heads | dropout | 1 query, 2 texts | long |"
    assert heads[2].startswith("| 12 heads of 32 | | 3.00, 4.00 ms: 0.75x |") and heads[3].startswith(
        "| 12 heads of 32 | 0.1 |"
    )
    assert rotary_table({"long": row("inductor", "ours")}).endswith(
        "| long | 1.00 + 2.00 ms | 2.00 + 2.00 ms | 0.75x |"
    )
