"""Examples of README and docs/ that need Sentence Transformers 6 run as printed, with stand-ins for models of the Hub."""

import re

import pytest

pytest.importorskip("sentence_transformers.multi_vector_encoder", reason="needs Sentence Transformers 6")

import pylate_fastmaxsim
from tests.support.examples import example
from tests.support.models import sentences


def test_the_lines_that_switch_it_on_and_mini_batches_by_tokens(encoder):
    names: dict = {}
    lines = example("enable-multi-vector", {'"answerdotai/ModernBERT-base"': repr(encoder("modernbert"))}).splitlines()
    try:
        exec("\n".join(line[1:] for line in lines), names)
        batch = [names["model"].preprocess(sentences(3, seed=seed)) for seed in (1, 2)]
        assert names["loss"](batch, None).requires_grad
        exec("from sentence_transformers.multi_vector_encoder import losses", names)
        exec(example("multi-vector-gradcache"), names)
        assert names["loss"](batch, None).requires_grad
    finally:
        pylate_fastmaxsim.disable()


def test_the_script_of_who_trains_with_sentence_transformers_prints_equal_losses(capsys):
    smaller = {"num_hidden_layers=4": "num_hidden_layers=2", "range(3)": "range(1)", "min(290": "min(60"}
    exec(example("sentence-transformers-gain", smaller), {})
    losses = re.findall(r"loss ([\d.]+)", capsys.readouterr().out)
    assert losses[0] == losses[1] and losses[2] == losses[3] and len(losses) == 4
