"""The clock of the benchmarks on a GPU."""

import time

import torch

from benchmarks.harness.timing import time_calls


class Event:
    def __init__(self, enable_timing):
        pass

    def record(self):
        pass

    def elapsed_time(self, other):
        return 1.0


def test_calls_are_timed_again_if_the_gpu_waited_for_the_host(monkeypatch):
    slept, calls = [], []
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.cuda, "_sleep", lambda cycles: slept.append(cycles / 2e9))

    def call():
        calls.append(None)
        if len(calls) == 10:  # the sixth of the first round
            time.sleep(0.02)

    found = time_calls([call], torch.device("cuda"))
    assert len(slept) == 2 and slept[1] > 0.02 > slept[0]
    assert len(calls) == 3 + 1 + 2 * 25 and found["iterations"] == 25 and found["host_ms"] < 20
