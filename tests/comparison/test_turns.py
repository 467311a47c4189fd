import math
from itertools import groupby

import pytest

from pylate_fastmaxsim.comparison import turns
from pylate_fastmaxsim.comparison.turns import Child, ChildFailed, python, take_turns
from pylate_fastmaxsim.comparison.verdict import timed_steps


@pytest.mark.process
@pytest.mark.smoke
@pytest.mark.usefixtures("forked")
def test_two_processes_step_by_turns_in_exchanged_order(tmp_path):
    trace = tmp_path / "trace"

    def child(work: int) -> Child:
        code = f"from tests.support import stepping; stepping.main(16, {work}, {str(trace)!r})"
        return Child(python(code), tmp_path / f"{work}.log")

    done = take_turns({"stock": child(80), "fast": child(20)})
    # Warm-up of both, then blocks of 3: stock fast, fast stock, stock fast, fast stock, of which the last have 2 steps.
    assert [len(list(steps)) for _, steps in groupby(trace.read_text().split())] == [5, 5, 3, 6, 6, 5, 2]
    for run in done.runs.values():
        assert run.status == "finished" and run.result == {"quality": 0.5} and run.device == "cpu"
        assert [step["loss"] for step in run.steps] == [pytest.approx(1 / step) for step in range(1, 17)]
        counted = [(block["steps"], block["pair"]) for block in run.blocks]
        assert counted == [(1, None), (4, None), (3, 0), (3, 1), (3, 2), (2, 3)]
        assert run.memory["peak"] >= run.memory["before"] > 2**20
        assert sum(block["seconds"] for block in run.blocks) < run.wall_seconds
        assert all(0 < block["cpu_seconds"] <= block["seconds"] + 0.05 for block in run.blocks)
    stock, fast = (sum(block["cpu_seconds"] for block in run.blocks) for run in done.runs.values())
    assert stock > 2 * fast
    assert not done.restarted


class Script:
    """Stands for processes: what each does is decided by a test, and nothing takes time."""

    def __init__(self, steps: int = 20, seconds: float = 0.1, peak: int = 10, memory: int = 100) -> None:
        self.steps, self.seconds, self.peak, self.memory = steps, seconds, peak, memory
        self.orders, self.alive = [], []
        self.runs_out = self.fails = lambda process: False

    def __call__(self, name: str, child: Child, again: bool, on_wait):
        self.alive.append(Scripted(self, name, again, on_wait))
        return self.alive[-1]


class Scripted:
    def __init__(self, script: Script, name: str, again: bool, on_wait) -> None:
        self.script, self.name, self.again, self.on_wait = script, name, again, on_wait
        self.taken, self.done, self.answers = 0, False, [{"ready": True}]

    def give_turn(self, steps: float) -> None:
        wanted = None if steps == math.inf else steps
        self.script.orders.append((self.name, wanted))
        if self.done:
            self.answers.append({"finished": {"again": self.again}})
            return
        steps = min(self.script.steps - self.taken, self.script.steps if wanted is None else wanted)
        self.taken += steps
        self.done = steps != wanted
        block = {
            "seconds": steps * self.script.seconds,
            "cpu_seconds": 0.0,
            "steps": [{"of": self.script.steps}] * steps,
        }
        block |= {"device": "cpu", "device_memory": self.script.memory}
        block["memory"] = {"before": 1, "peak": self.script.peak}
        self.answers.append({"block": block, "done": self.done})

    def report(self) -> dict:
        self.on_wait(self.name)
        if self.script.fails(self):
            raise ChildFailed(self.name, 1, self.script.log)
        if self.script.runs_out(self):
            return {"finished": {"status": "out of memory"}}
        return self.answers.pop(0)

    def end(self) -> None:
        self.script.alive.remove(self)


@pytest.fixture
def play(monkeypatch):
    def played(script: Script, names=("stock", "fast"), log=None, **options):
        monkeypatch.setattr(turns, "_Process", script)  # private: real processes take real time and memory
        done = take_turns(dict.fromkeys(names, Child([], log)), **options)
        assert not script.alive
        return done

    return played


def pairs(run) -> list[tuple[int, int]]:
    return [(block["pair"], block["steps"]) for block in run.blocks if block["pair"] is not None]


def test_blocks_have_two_seconds_of_the_fastest_where_that_leaves_six(play):
    long = Script(steps=1000)
    play(long)
    assert long.orders[:4] == [("stock", 1), ("stock", 4), ("fast", 1), ("fast", 4)]
    assert long.orders[4:8] == [("stock", 20), ("fast", 20), ("fast", 20), ("stock", 20)]
    done = play(Script(steps=65))
    assert pairs(done.runs["stock"]) == pairs(done.runs["fast"]) == [(pair, 10) for pair in range(6)]
    few = play(Script(steps=2)).runs["fast"]
    assert [(block["pair"], block["steps"]) for block in few.blocks] == [(None, 1), (0, 1)]


@pytest.mark.parametrize("reason", ["the second runs out beside the first", "both together take nearly all"])
def test_where_memory_does_not_hold_both_each_is_started_alone(reason, play):
    script = Script(peak=46 if reason.startswith("both") else 10)
    if reason.startswith("the second"):
        script.runs_out = lambda process: process.name == "fast" and len(script.alive) == 2
    done = play(script)
    assert done.restarted
    for run in done.runs.values():
        # Once to its end, and twice for a block.
        assert run.status == "finished" and len(run.steps) == 20 and run.result == {"again": False}
        assert pairs(run) == [(0, 15), (1, 15), (2, 15)]
        # The blocks of later starts are not of its steps.
        assert [step["seconds"] for step in timed_steps(run)] == pytest.approx([0.1] * 20)
    starts = [name for name, steps in script.orders if steps == 15]
    assert starts[-6:] == ["stock", "fast", "fast", "stock", "stock", "fast"]
    assert pairs(play(script, rounds=1).runs["fast"]) == [(0, 15)]


def test_a_gpu_that_takes_one_process_at_a_time(play, tmp_path):
    script = Script()
    script.log = tmp_path / "log"
    script.fails = lambda process: len(script.alive) > 1
    script.log.write_text("torch.AcceleratorError: CUDA error: CUDA-capable device(s) is/are busy or unavailable")
    done = play(script)
    assert done.restarted and [run.status for run in done.runs.values()] == ["finished", "finished"]
    script.log.write_text("torch.AcceleratorError: CUDA error: misaligned address")
    with pytest.raises(ChildFailed, match="The fast run ended with exit code 1"):
        play(script)


def test_one_that_runs_out_of_memory_alone_is_a_result(play):
    script = Script()
    script.runs_out = lambda process: process.name == "stock" and process.taken == 1
    done = play(script)
    assert done.runs["stock"].status == "out of memory" and not done.restarted
    assert done.runs["fast"].status == "finished" and len(done.runs["fast"].steps) == 20
    script.runs_out = lambda process: process.name == "fast" and process.taken > 4
    done = play(script)
    assert done.restarted and [run.status for run in done.runs.values()] == ["finished", "out of memory"]
    assert len(pairs(done.runs["stock"])) == 1


def test_all_ranks_go_the_same_way(play):
    done = play(Script(), gather=lambda value: [value, 7 if type(value) is int else value])  # a faster one
    assert pairs(done.runs["fast"])[:2] == [(0, 7), (1, 7)]
    script = Script()

    def gather_of_one_that_ran_out(value):
        return [value, "out of memory" if value == "finished" and script.orders[-1] == ("fast", 4) else value]

    script.orders[:] = [("", None)]
    assert play(script, names=("fast",), gather=gather_of_one_that_ran_out).runs["fast"].status == "out of memory"
