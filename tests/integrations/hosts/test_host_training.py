"""Training by the trainers of Sentence Transformers, and the poolings of the docs."""

import pytest
import torch
from datasets import Dataset

import pylate_fastmaxsim
from tests.support.examples import example
from tests.support.hosts import OF_SENTENCE_TRANSFORMERS, each_host
from tests.support.models import sentences

ROWS = {"query": sentences(12, 6, 1), "positive": sentences(12, 20, 2), "negative": sentences(12, 20, 3)}


@pytest.mark.parametrize("host", each_host(OF_SENTENCE_TRANSFORMERS))
def test_the_trainer_logs_the_losses_of_stock(encoder, packed, tmp_path, host):
    model = host.model(encoder).float()
    start = {name: weight.clone() for name, weight in model.state_dict().items()}
    trainer_class, arguments = host.trainer
    options = {"per_device_train_batch_size": 4, "max_steps": 4, "logging_steps": 1, "learning_rate": 1e-2}
    options |= {"report_to": "none", "use_cpu": True, "disable_tqdm": True, "save_strategy": "no"}

    def logged() -> list[float]:
        model.load_state_dict(start)
        loss = host.losses["cached"](model).loss
        args = arguments(output_dir=str(tmp_path), **options)
        trainer = trainer_class(model=model, args=args, train_dataset=Dataset.from_dict(ROWS), loss=loss)
        trainer.train()
        return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]

    stock = logged()
    assert len(set(stock)) == 4
    host.enable()
    assert logged() == pytest.approx(stock, rel=1e-4)
    assert host.modes(model) == {"packed"}
    # What is saved is the model as stock has it.
    model.save_pretrained(str(tmp_path / "saved"))
    expected = encoded(model)
    pylate_fastmaxsim.disable()
    torch.testing.assert_close(encoded(type(model)(str(tmp_path / "saved"), device="cpu")), expected)


def encoded(model) -> list[torch.Tensor]:
    embeddings = model.encode(ROWS["positive"][:2], show_progress_bar=False)
    return [*(embeddings.to_dense() if isinstance(embeddings, torch.Tensor) else embeddings)]


@pytest.mark.parametrize("host", each_host(["MultiVectorEncoder"]))
def test_the_poolings_of_the_docs(encoder, packed, host):
    stand_in = encoder("modernbert", **host.changes)
    names: dict = {}
    exec(example("pooled-scores-multi-vector", {'"answerdotai/ModernBERT-base"': repr(stand_in)}), names)
    assert names["scores"].shape == (1, 2)
    for loss in ("contrastive", "margins"):
        step = host.losses["distillation"](names["model"].float())
        names[loss](step.batch, step.labels.float()).backward()
