"""``fastmaxsim compare train.py``: real scripts, and what is left of them."""

import re
import socket
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from pylate_fastmaxsim.comparison import script
from pylate_fastmaxsim.comparison.script import SEVERAL_MACHINES, Ranks
from pylate_fastmaxsim.comparison.turns import OUT_OF_MEMORY
from tests.support.case_tables import case_table
from tests.support.compared_script import accelerated, compare, compared
from tests.support.examples import script_of
from tests.support.launcher import LAUNCH, WAYS

pytestmark = pytest.mark.usefixtures("forked")

STEPS = ("--steps", "12")


@pytest.mark.e2e
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.cuda)])
def test_the_script_of_pylate_compares_as_printed(encoder, tmp_path, device):
    pytest.importorskip("pylate")
    text = script_of("pylate_contrastive", {"bf16=torch.cuda.is_available()": f"bf16=True, use_cpu={device == 'cpu'}"})
    # On a GPU PyLate may score by flash-maxsim, which drops tokens at the end in the place of punctuation.
    text = text.replace("document_length=300", "document_length=300, skiplist_words=[]")
    found = compared(tmp_path, text, *STEPS)
    stock, fast = found["runs"]["stock"], found["runs"]["fast"]
    # Its epoch has two steps.
    assert (stock["steps"], fast["steps"]) == (12, 12)
    assert 0.7 < stock["padding"] < 1 and 0 <= fast["padding"] < 0.2
    assert ("are packed" if device == "cuda" else "in groups") in fast["decisions"][0]
    # Stock rounds to 16 bits.
    assert 0 < found["summary"]["largest_loss_difference"] < 0.1
    assert stock["losses"][0] > stock["losses"][-1] > 0
    assert found["summary"]["turns"]["pairs"] == 3


SPLADE = """
from datasets import Dataset
from sentence_transformers import SparseEncoder, SparseEncoderTrainer, SparseEncoderTrainingArguments
from sentence_transformers.sparse_encoder.losses import SpladeLoss, SparseMultipleNegativesRankingLoss
from transformers import EarlyStoppingCallback, TrainerCallback

class Watch(TrainerCallback):
    def on_save(self, *_, **kwargs):
        raise AssertionError("saved or evaluated")

    on_evaluate = on_save

model = SparseEncoder({model!r}, device="cpu")
words = "late interaction keeps one vector for every token of a document".split()
rows = Dataset.from_dict({{"query": words, "document": [" ".join(words[n:]) for n in range(len(words))]}})
arguments = SparseEncoderTrainingArguments(
    "output", num_train_epochs=1, per_device_train_batch_size=2, gradient_accumulation_steps=2, use_cpu=True,
    save_strategy="steps", save_steps=1, eval_strategy="steps", eval_steps=1, eval_on_start=True,
    load_best_model_at_end=True, metric_for_best_model="eval_loss",
)
loss = SpladeLoss(model, SparseMultipleNegativesRankingLoss(model), 1e-3, 5e-5)
trainer = SparseEncoderTrainer(model, arguments, rows, rows, loss, callbacks=[EarlyStoppingCallback(), Watch()])
trainer.train(resume_from_checkpoint=True)
trainer.save_model("final")
"""


@pytest.mark.e2e
def test_a_sparse_encoder_that_saves_and_evaluates_leaves_nothing(encoder, monkeypatch, tmp_path):
    pytest.importorskip("sentence_transformers.sparse_encoder")
    monkeypatch.chdir(tmp_path)
    run = accelerated(tmp_path, SPLADE.format(model=encoder("bert", masked_lm=True)), 12)
    # An epoch has three steps, each of two batches of two rows.
    assert (run["steps"], len(run["losses"]), run["warnings"]) == (12, 12, [])
    assert run["documents_per_second"] > 0


LOOP = """
import os, torch

if os.environ["PYLATE_FASTMAXSIM"] == "0":
    raise torch.OutOfMemoryError("CUDA out of memory.")

class Cached(torch.autograd.Function):
    def forward(ctx, x):
        return x.clone()

    def backward(ctx, gradient):
        with torch.enable_grad():
            (1000 * torch.ones(1, requires_grad=True)).sum().backward()
        return gradient

weight = torch.ones(1, requires_grad=True)
first, second = torch.optim.SGD([weight], lr=0.5), torch.optim.SGD([torch.ones(1, requires_grad=True)], lr=0.1)
scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
for step in range(7):
    for part in (3, 1):
        scaler.scale(Cached.apply((part * weight).sum())).backward()
    scaler.step(first)
    scaler.update()
    second.step()
    first.zero_grad()
"""


@pytest.mark.process
def test_a_loop_of_ones_own_is_measured_and_out_of_memory_is_a_result(tmp_path):
    found = compared(tmp_path, LOOP)
    stock, fast = found["runs"]["stock"], found["runs"]["fast"]
    assert stock["status"] == OUT_OF_MEMORY and found["summary"]["speedup"] is None
    # The last backward of each step, before it was scaled; each step takes 2 off the weight.
    assert fast["losses"] == [1 - 2 * step for step in range(7)]
    nothing, ended = fast["warnings"]
    assert "Nothing was accelerated" in nothing and ended == "training ended after 7 of 30 steps."


DISTRIBUTED = """
import os
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
torch.manual_seed(0)
model = DistributedDataParallel(torch.nn.Linear(4, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for step in range(100):
    if step == 9 and dist.get_rank() == 1 and os.environ["PYLATE_FASTMAXSIM"] == "0":
        raise torch.OutOfMemoryError("CUDA out of memory.")
    model(torch.full((2, 4), 1.0 + dist.get_rank())).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
"""


@pytest.mark.process
def test_two_processes_of_a_launcher_step_by_the_same_turns_until_one_is_out_of_memory(tmp_path):
    pytest.importorskip("accelerate")
    launch = ("-m", *LAUNCH, *WAYS["ddp"], "-m", "pylate_fastmaxsim.compare")
    found = compared(tmp_path, DISTRIBUTED, *STEPS, command=launch)
    stock, fast = found["runs"]["stock"], found["runs"]["fast"]
    # Both wait in vain for the step of the second process, so that each process is started alone, and waits again.
    assert found["recipe"]["processes"] == 2 and found["summary"]["restarted"]
    assert (stock["status"], fast["status"], fast["steps"]) == (OUT_OF_MEMORY, "finished", 12)
    assert 4 <= stock["steps"] <= 9 and stock["losses"] == fast["losses"][: stock["steps"]]


@pytest.mark.process
@pytest.mark.parametrize("end", ["raise KeyError(0)", "print('usage', file=sys.stderr), sys.exit(3)", "os._exit(0)"])
def test_a_script_that_fails_ends_as_it_does_alone(end, tmp_path):
    done = compare(tmp_path, f"import os, sys\ndef f():\n    {end}\nf()\n")
    alone = subprocess.run([sys.executable, "train.py"], cwd=tmp_path, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (alone.returncode or 1, "")
    # A script that ends too early by itself has no error of its own.
    assert done.stderr == alone.stderr if alone.returncode else "exit code 0" in done.stderr


@case_table("""
words | error
absent.py | : there is no script absent.py.
| : name what to run: SCRIPT.py, or -m MODULE
--steps 5 FILE | : argument --steps: must be a whole number of at least 6, got '5'
--output /proc FILE | '/proc/
""")
def test_nothing_to_compare_is_one_sentence(words, error, capsys):
    with pytest.raises(SystemExit, match="2"):
        script.compare_script(words.replace("FILE", __file__).split())
    assert error in capsys.readouterr().err.splitlines()[-1]


def test_ranks_of_several_machines_are_refused(monkeypatch):
    store = torch.distributed.TCPStore("127.0.0.1", 0, is_master=True)  # finds a free port
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", str(store.port))
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    monkeypatch.setattr(socket, "gethostname", lambda: str(threading.get_ident()))

    def refused(rank: int) -> None:
        with pytest.raises(ValueError, match=re.escape(SEVERAL_MACHINES)):
            Ranks({"RANK": str(rank), "WORLD_SIZE": "2"})

    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(refused, range(2))) == [None] * 2
