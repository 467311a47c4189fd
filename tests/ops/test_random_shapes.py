"""The script of the random shapes finds what is wrong and repeats it."""

from types import SimpleNamespace

import pytest
import torch

from pylate_fastmaxsim.cpu import maxsim as blocked
from tests.support import random_shapes


def test_nothing_fails(capsys):
    assert random_shapes.main(["--count", "50"]) == 0
    assert capsys.readouterr().out == "50 shapes, failed: []; next: --seed 0 --start 50\n"


def no_keep(operands, *arguments):
    return blocked.forward(operands._replace(d_keep=None), *arguments)


def nan_hidden(*arguments):
    scores, winners = blocked.forward(*arguments)
    return scores.nan_to_num(posinf=torch.inf, neginf=-torch.inf), winners


@pytest.mark.parametrize("forward, start", [(no_keep, 0), (nan_hidden, 220)])
def test_a_wrong_forward_is_found_and_repeated(forward, start, capsys):
    wrong = SimpleNamespace(forward=forward, backward=blocked.backward)
    assert random_shapes.main(["--start", str(start), "--count", "20"], wrong) == 1
    number = capsys.readouterr().out.split("FAILED ")[1].split(":")[0]
    assert random_shapes.main(["--start", number, "--count", "1"], wrong) == 1
