"""Where a step's time goes: a part that is made slow shows under its own name, and nowhere else."""

from __future__ import annotations

import doctest
import time

import pytest

pytest.importorskip("datasets")
pytest.importorskip("pylate")

import torch
from tiny_recipe import tiny, write

from pylate_fastmaxsim.recipes import compare, phases
from pylate_fastmaxsim.recipes.data import load_data
from pylate_fastmaxsim.recipes.load import load_recipe
from pylate_fastmaxsim.recipes.model import load_model
from pylate_fastmaxsim.recipes.phases import PHASES, WARM_UP_STEPS, PhaseTrainer, Stopwatch, median_phases
from pylate_fastmaxsim.recipes.prepare import prepare
from pylate_fastmaxsim.recipes.train import build_trainer, switched, training_arguments

PAUSE = 0.05


def slow(function):
    def slowed(*args, **kwargs):
        time.sleep(PAUSE)
        return function(*args, **kwargs)

    return slowed


@pytest.mark.parametrize("fast", [False, True])
@pytest.mark.parametrize("loss", [{"name": "contrastive"}, {"name": "cached_contrastive", "mini_batch_size": 2}])
def test_a_slow_part_shows_under_its_name(loss, fast, tmp_path, monkeypatch):
    recipe = tiny(tmp_path, loss=loss, fast={"enabled": fast}, training={"max_steps": WARM_UP_STEPS + 2})
    prepared = prepare(load_recipe(write(tmp_path, recipe)))
    arguments = training_arguments(prepared, save_strategy="no", disable_tqdm=True)
    rows = load_data(prepared).train
    taken = {}
    with switched(prepared.fast):
        for part in ("none", *PHASES):
            model = load_model(prepared.model, "cpu", seed=0)
            trainer = build_trainer(prepared, model, rows, arguments, PhaseTrainer)
            if part == "tokenise":
                trainer.data_collator.tokenize_fn = slow(trainer.data_collator.tokenize_fn)
            elif part == "encode":
                model[0].register_forward_pre_hook(slow(lambda *_: None))
            elif part == "score":
                trainer.loss.register_forward_pre_hook(slow(lambda *_: None))
            elif part == "backward":
                trainer.accelerator.backward = slow(trainer.accelerator.backward)
            elif part == "optimise":
                trainer.create_optimizer()
                trainer.optimizer.register_step_pre_hook(slow(lambda *_: None))
            begin = time.perf_counter()
            trainer.train()
            assert sum(map(sum, (lap.values() for lap in trainer.laps))) <= time.perf_counter() - begin
            taken[part] = median_phases(trainer.laps)
    for part in PHASES:
        for phase in PHASES:
            longer = taken[part][phase] - taken["none"][phase]
            assert (longer > 0.9 * PAUSE) == (part == phase), (part, phase, longer)
    # GradCache encodes everything twice, the second time in the backward; with a pause in every call.
    calls = 8 if loss["name"] == "cached_contrastive" and not fast else 2
    assert taken["encode"]["encode"] > 0.9 * calls * PAUSE


def test_no_moment_counts_twice():
    watch = Stopwatch(torch.device("cpu"))
    watch.start("score")
    watch.enter("encode")
    time.sleep(PAUSE)
    watch.leave()
    watch.start("backward")
    time.sleep(2 * PAUSE)
    lap = watch.lap()
    assert lap["score"] < PAUSE / 2 < PAUSE <= lap["encode"] < 2 * PAUSE <= lap["backward"]
    watch.start("score")
    assert set(watch.lap()) == {"score"}


@pytest.mark.parametrize("module", [phases, compare])
def test_examples_run(module):
    assert doctest.testmod(module).failed == 0


@pytest.mark.cuda
def test_on_a_gpu_the_device_is_timed_and_not_the_host():
    device = torch.device("cuda")
    matrix = torch.randn(8192, 8192, device=device)
    matrix @ matrix
    torch.cuda.synchronize()
    watch = Stopwatch(device)
    begin = time.perf_counter()
    watch.start("score")
    for _ in range(20):
        matrix @ matrix
    watch.start("backward")
    launched = time.perf_counter() - begin
    lap = watch.lap()
    assert lap["score"] > 5 * launched and lap["score"] > 10 * lap["backward"]
