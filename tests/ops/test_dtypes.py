"""float32_precision follows every switch of PyTorch, and no switch breaks an operator."""

from __future__ import annotations

import pytest
import torch

from pylate_fastmaxsim import maxsim, maxsim_from_hidden, xtr_scores
from pylate_fastmaxsim._dtypes import float32_precision

pytestmark = pytest.mark.skipif(
    not hasattr(torch.backends, "fp32_precision"), reason="this release of PyTorch has one way to say it"
)


@pytest.fixture(autouse=True)
def as_it_was():
    yield
    backends = torch.backends, torch.backends.cuda.matmul, torch.backends.mkldnn.matmul
    for each in backends:
        each.fp32_precision = "none"
    torch.set_float32_matmul_precision("highest")
    for each in backends[1:]:
        each.fp32_precision = "none"


def everywhere(value):
    torch.backends.fp32_precision = value


def of_products(value):
    torch.backends.cuda.matmul.fp32_precision = value


def allow_tf32(value):
    torch.backends.cuda.matmul.allow_tf32 = value


older = torch.set_float32_matmul_precision
SETTINGS = {
    "default": ([], "highest"),
    "older-highest": ([(older, "highest")], "highest"),
    "older-high": ([(older, "high")], "high"),
    "allow_tf32": ([(allow_tf32, True)], "high"),
    "newer-tf32": ([(of_products, "tf32")], "high"),
    "newer-ieee": ([(of_products, "ieee")], "highest"),
    # What TrainingArguments(tf32=True) does.
    "everywhere-tf32": ([(everywhere, "tf32")], "high"),
    "older-high-then-newer-ieee": ([(older, "high"), (of_products, "ieee")], "highest"),
    "older-medium-then-not": ([(older, "medium"), (allow_tf32, False)], "highest"),
}


@pytest.mark.parametrize("settings, expected", SETTINGS.values(), ids=SETTINGS)
def test_every_setting_is_followed_and_no_operator_stops(settings, expected):
    queries, documents = torch.randn(2, 3, 4), torch.randn(5, 6, 4)
    weight = torch.randn(4, 4)

    def results():
        leaves = [tensor.clone().requires_grad_() for tensor in (queries, documents, weight)]
        q, d, w = leaves
        scores = [maxsim(q, d), xtr_scores(q, d, k=7), maxsim_from_hidden(q, d, w)]
        return [*scores, *torch.autograd.grad(sum(score.square().sum() for score in scores), leaves)]

    before = results()
    for function, value in settings:
        function(value)
    assert float32_precision(torch.float32) == expected
    assert float32_precision(torch.bfloat16) == float32_precision(torch.float64) == "highest"
    torch.testing.assert_close(results(), before, rtol=1e-2, atol=1e-2)
