"""Examples of README and docs/ that need Sentence Transformers 6 run as printed, with stand-ins for models of the Hub."""

import pytest

pytest.importorskip("sentence_transformers.multi_vector_encoder", reason="needs Sentence Transformers 6")

from tests.support.compared_script import compared
from tests.support.examples import example, run_example, run_script, script_of
from tests.support.models import sentences


def test_the_lines_that_switch_it_on_and_mini_batches_by_tokens(encoder):
    names: dict = {}
    stand_in = {'"answerdotai/ModernBERT-base"': repr(encoder("modernbert"))}
    exec("\n".join(line[1:] for line in example("enable-multi-vector", stand_in).splitlines()), names)
    batch = [names["model"].preprocess(sentences(3, seed=seed)) for seed in (1, 2)]
    assert names["loss"](batch, None).requires_grad
    assert run_example("multi-vector-gradcache", stand_in).loss(batch, None).requires_grad


@pytest.mark.parametrize("name", ["multi_vector_encoder", "splade"])
def test_the_scripts_print_what_stock_finds(name, capsys, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    run_script(name, capsys)


@pytest.mark.e2e
@pytest.mark.usefixtures("forked")
def test_the_script_of_a_multi_vector_encoder_compares_as_printed(tmp_path):
    text = script_of("multi_vector_encoder", {"bf16=torch.cuda.is_available()": "bf16=True, use_cpu=True"})
    found = compared(tmp_path, text, "--steps", "12")
    stock, fast = found["runs"]["stock"], found["runs"]["fast"]
    assert (stock["steps"], fast["steps"]) == (12, 12) and 0.5 < stock["padding"] < 0.8
    assert found["summary"]["largest_loss_difference"] < 0.1 and found["summary"]["turns"]["pairs"] == 3
