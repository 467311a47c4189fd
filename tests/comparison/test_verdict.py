import pytest

from pylate_fastmaxsim.comparison.report import caption, headline
from pylate_fastmaxsim.comparison.turns import Run, Turns
from pylate_fastmaxsim.comparison.verdict import summarize_steps, summarize_turns, verdict
from tests.support.comparisons import run_of_blocks as run
from tests.support.comparisons import steps as steps_of


def test_the_ratio_is_of_blocks_beside_each_other():
    judged = verdict(run(2.0, 2.0, 4.1, 4.0), run(1.0, 1.0, 2.0, 2.0))
    assert judged["ratio"] == 2.0 and judged["pairs"] == 4 and judged["cpu_ratio"] == pytest.approx(2.0)
    assert judged["quartiles"] == pytest.approx([2.0, 2.0125]) and not judged["busy"] and judged["why_busy"] is None
    # One that was disturbed alone does not turn it.
    assert verdict(run(2.0, 2.0, 9.0, 2.0, 2.0), run(*[1.0] * 5))["ratio"] == 2.0
    # Blocks that have no partner, or one of other steps, do not count.
    assert verdict(run(2.0, 2.0), run(1.0))["pairs"] == 1
    assert verdict(run(2.0), run(1.0, steps=2)) is verdict(run(), run()) is None


def test_a_machine_is_busy_where_ratios_are_apart_or_cpu_seconds_say_another():
    # A long last block, which stood beside none, turns the medians alone.
    for step, is_left_out in ((1 / 3, False), (3.0, True)):
        fast = run(*[1.0] * 4)
        fast.steps += [{"loss": 1.0}] * 30
        fast.blocks += [{"seconds": 30 * step, "cpu_seconds": 1.0, "steps": 30, "pair": None}]
        runs = {"stock": run(2.0, 2.0, 2.4, 2.6), "fast": fast}
        compared = summarize_turns(Turns(runs, restarted=False))
        assert is_left_out != all("step_seconds" in each for each in compared["runs"].values())
        said = caption({"recipe": {"name": "x"}, **compared})
        assert is_left_out == ("Median steps, which contradict it, are left out." in said)
    judged = verdict(run(2.0, 2.0, 2.4, 2.6), run(*[1.0] * 4))
    assert judged["busy"] and "half of the 4 pairs of blocks have ratios from 2.00 to 2.45" in judged["why_busy"]
    assert not verdict(run(2.0, 2.0, 2.2, 2.3), run(*[1.0] * 4))["busy"]
    stock, fast = run(1.0, 1.0, cpu=2.0), run(1.0, 1.0, cpu=1.0)
    judged = verdict(stock, fast)
    assert judged["busy"] and "the ratio of CPU seconds is 2.0, that of wall seconds 1.0" in judged["why_busy"]
    assert not verdict(stock, run(1.0, 1.0, cpu=1.7))["busy"]
    # The host waits for a GPU, so that its seconds say nothing about steps.
    assert not verdict(run(1.0, device="cuda"), run(1.0, cpu=1.0, device="cuda"))["busy"]
    # Too short for the clock of the system.
    assert verdict(run(1.0, cpu=0.0), run(1.0, cpu=0.0))["cpu_ratio"] is None


def test_what_the_report_takes():
    compared = summarize_turns(Turns({"stock": run(6.0, 6.0), "fast": run(3.0, 3.0)}, restarted=False))
    assert compared["summary"]["speedup"] == compared["summary"]["turns"]["ratio"] == 2.0
    assert compared["summary"]["wall_seconds"] == {"stock": 9.0, "fast": 9.0}
    # Of 11 steps, 5 are warm-up.
    assert compared["runs"]["fast"]["step_seconds"] == 1.0 and compared["runs"]["fast"]["cpu_step_seconds"] == 2.0
    gone = summarize_turns(Turns({"stock": Run("out of memory"), "fast": run(3.0)}, restarted=False))
    assert gone["summary"]["speedup"] is gone["summary"]["turns"] is None
    warm_up = summarize_turns(Turns({"stock": run(), "fast": run()}, restarted=False))
    assert warm_up["summary"]["speedup"] is None
    assert headline({"recipe": {"name": "x"}, **warm_up}).endswith("too few steps for a verdict on the speed")


def test_times_are_taken_after_the_warm_up_and_padding_over_all_steps():
    taken = summarize_steps(steps_of([9.0] * 5 + [1.0, 2.0, 3.0] + [2.0] * 8, encoded=80))
    assert (taken["step_seconds"], taken["padding"]) == (2.0, 0.5)
    assert (taken["documents_per_second"], taken["live_tokens_per_second"]) == (4 * 11 / 22, 30 * 11 / 22)
    # In a short run the warm-up is a third.
    assert summarize_steps(steps_of([9.0, 1.0, 1.0], encoded=80))["step_seconds"] == 1.0
    assert "step_seconds" not in summarize_steps([])
