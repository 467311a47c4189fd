"""The script of the random shapes finds what is wrong, says how to repeat it, and goes on where it stopped."""

import re
from dataclasses import replace
from types import SimpleNamespace

import pytest
import random_shapes
import torch

from pylate_fastmaxsim.cpu import maxsim as blocked

CPU = random_shapes.Path(blocked, "cpu", products=2**16, values=2**12)


def broken(**parts):
    functions = {"forward": blocked.forward, "backward": blocked.backward, **parts}
    return replace(CPU, module=SimpleNamespace(__name__="broken", **functions))


def run(monkeypatch, capsys, path, *arguments):
    monkeypatch.setattr(random_shapes, "available_path", lambda: path)
    monkeypatch.setattr("sys.argv", ["random_shapes.py", *arguments])
    return random_shapes.main(), capsys.readouterr().out


def test_nothing_fails(monkeypatch, capsys):
    status, printed = run(monkeypatch, capsys, CPU, "--count", "80")
    assert status == 0 and re.search(r"^80 shapes in \d+ s, 0 failed$", printed, re.MULTILINE)


def no_keep(operands, *arguments):
    return blocked.forward(operands._replace(d_keep=None), *arguments)


def nan_hidden(*arguments):
    scores, winners = blocked.forward(*arguments)
    return scores.nan_to_num(posinf=torch.inf, neginf=-torch.inf), winners


@pytest.mark.parametrize("forward", [no_keep, nan_hidden])
def test_a_wrong_forward_is_found_and_can_be_repeated(forward, monkeypatch, capsys):
    wrong = broken(forward=forward)
    status, printed = run(monkeypatch, capsys, wrong, "--count", "400")
    assert status == 1
    again = re.search(r"random_shapes.py (--seed 0 .*)$", printed, re.MULTILINE).group(1).split()
    status, printed = run(monkeypatch, capsys, wrong, *again)
    assert status == 1 and "1 shapes in" in printed and f"FAILED {again[-3]}" in printed


def test_a_wrong_gradient_is_found(monkeypatch, capsys):
    def backward(*arguments):
        return tuple(1.02 * gradient for gradient in blocked.backward(*arguments))

    wrong = broken(backward=backward)
    status, printed = run(monkeypatch, capsys, wrong, "--count", "20")
    assert status == 1 and "AssertionError: query gradient" in printed


def test_the_budget_stops_and_says_where_to_go_on(monkeypatch, capsys):
    status, printed = run(monkeypatch, capsys, CPU, "--budget", "0", "--start", "7", "--count", "5")
    assert status == 0 and "go on with: --seed 0 --families 64 --start 7 --count 5" in printed
