"""Where a step's time goes: a part that is made slow shows under its own name, and nowhere else."""

import time
from types import SimpleNamespace

import pytest
import torch

from pylate_fastmaxsim.comparison.verdict import PHASES
from pylate_fastmaxsim.recipes.comparison import phases
from pylate_fastmaxsim.recipes.comparison.phases import WARM_UP_STEPS, PhaseTimer
from pylate_fastmaxsim.recipes.load import load_recipe
from pylate_fastmaxsim.recipes.models.load import kind_of, load_model
from pylate_fastmaxsim.recipes.plugin import plugin_of
from pylate_fastmaxsim.recipes.training.arguments import training_arguments
from pylate_fastmaxsim.recipes.training.inputs import load_data, prepare
from tests.support.tiny_recipe import tiny, write

PAUSE = 0.5


class Clock:
    """A clock of the host that only ``pass_by`` moves, so that no load of the machine shows in a phase."""

    now = 0.0

    def perf_counter(self) -> float:
        return self.now

    def pass_by(self, *_: object) -> None:
        self.now += PAUSE

    def slow(self, function):
        return lambda *args, **kwargs: self.pass_by() or function(*args, **kwargs)


@pytest.fixture
def clock(monkeypatch) -> Clock:
    monkeypatch.setattr(phases, "time", clock := Clock())
    return clock


@pytest.mark.parametrize("fast", [True, False])
def test_a_slow_part_shows_under_its_name(fast, tmp_path, clock):
    loss = {} if fast else {"name": "cached_contrastive", "mini_batch_size": 2}
    recipe = tiny(tmp_path, loss=loss, fast={"enabled": fast}, training={"max_steps": WARM_UP_STEPS + 2})
    prepared = prepare(load_recipe(write(tmp_path, recipe)))
    kind = kind_of(prepared.model)
    arguments = training_arguments(prepared, kind, save_strategy="no", disable_tqdm=True)
    rows = load_data(prepared).train
    taken = {}
    with plugin_of(prepared.fast):
        for part in ("none", *PHASES):
            model = load_model(prepared.model, "cpu", seed=0)
            trainer = kind.build_trainer(prepared.loss, model, rows, arguments)
            if part == "tokenise":
                trainer.data_collator.tokenize_fn = clock.slow(trainer.data_collator.tokenize_fn)
            elif part == "encode":
                model[0].register_forward_pre_hook(clock.pass_by)
            elif part == "score":
                trainer.loss.register_forward_pre_hook(clock.pass_by)
            elif part == "backward":
                trainer.accelerator.backward = clock.slow(trainer.accelerator.backward)
            elif part == "optimise":
                trainer.create_optimizer()
                trainer.optimizer.register_step_pre_hook(clock.pass_by)
            timer, begin = PhaseTimer(trainer), clock.now
            trainer.train()
            assert sum(sum(lap.values()) for lap in timer.laps) == clock.now - begin
            taken[part] = timer.median_seconds()
    for part in PHASES:
        assert all((taken[part][phase] > 0) == (phase == part) for phase in PHASES), (part, taken[part])
    if not fast:
        # GradCache encodes two mini-batches of queries and of documents, the second time in the backward.
        assert taken["encode"]["encode"] == 8 * PAUSE


def test_the_warm_up_is_at_most_a_third_of_the_steps():
    timer = PhaseTimer.__new__(PhaseTimer)
    none = dict.fromkeys(PHASES, 0.0)
    timer.laps = [none | {"score": 9.0}] * 2 + [none | {"score": 1.0}] * 5
    assert timer.median_seconds()["score"] == 1.0
    # As many as an epoch has before one without a batch ends the training.
    timer.laps = [none | {"score": 2.0}]
    assert timer.median_seconds() == {phase: 2.0 * (phase == "score") for phase in PHASES}


@pytest.mark.cuda
def test_on_a_gpu_the_device_is_timed_and_not_the_host():
    device = torch.device("cuda")
    matrix = torch.randn(8192, 8192, device=device)
    matrix @ matrix
    torch.cuda.synchronize()

    trainer = SimpleNamespace(
        args=SimpleNamespace(device=device),
        compute_loss=lambda: [matrix @ matrix for _ in range(20)] and None,
        training_step=lambda: trainer.compute_loss(),
        model=torch.nn.Identity(),
        add_callback=lambda callback: None,
    )
    timer = PhaseTimer(trainer)
    timer.on_train_begin(None, None, None)
    begin = time.perf_counter()
    trainer.training_step()
    launched = time.perf_counter() - begin
    timer.on_step_end(None, None, None)
    [lap] = timer.laps
    assert lap["score"] > 5 * launched and lap["score"] > 10 * lap["backward"]
