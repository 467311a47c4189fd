"""GradCache of colpali-engine's losses: loss and gradients of the whole batch, with images, by hand and in its trainer."""

import pytest
import torch

pytest.importorskip("colpali_engine", reason='needs colpali-engine: pip install -e ".[test]"')

from colpali_engine import loss as colpali_losses
from colpali_engine.collators import VisualRetrieverCollator
from colpali_engine.data import ColPaliEngineDataset
from colpali_engine.models import ColPali, ColPaliProcessor, ColQwen2, ColQwen2Processor
from colpali_engine.trainer.contrastive_trainer import ContrastiveTrainer
from transformers import TrainingArguments

import pylate_fastmaxsim
from pylate_fastmaxsim.losses.colpali import GradCache, GradCacheTrainer
from tests.support.compared import assert_equal
from tests.support.models import sentences
from tests.support.visual_models import build_visual_model, page

ROWS = 6
# Norms of these models are computed in float32.
TOLERANCE = 1e-6


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> str:
    return build_visual_model(tmp_path_factory.mktemp("colqwen2"), "colqwen2")


def load(folder: str) -> tuple[ColQwen2, ColQwen2Processor]:
    return ColQwen2.from_pretrained(folder).double().train(), ColQwen2Processor.from_pretrained(folder)


def data_of(negatives: bool = False) -> ColPaliEngineDataset:
    made = [{"query": text, "pos_target": [page(i)]} for i, text in enumerate(sentences(ROWS, longest=6))]
    if negatives:
        made = [{**row, "neg_target": [page(10 + i), page(20 + i)]} for i, row in enumerate(made)]
    column = {"neg_target_column_name": "neg_target"} if negatives else {}
    return ColPaliEngineDataset(made, pos_target_column_name="pos_target", **column)


def trainer_of(folder: str, output, loss, data, symmetric=False, mini_batch_size=None, **arguments):
    model, processor = load(folder)
    options = {"per_device_train_batch_size": ROWS, "report_to": [], "use_cpu": True, "logging_steps": 1, "seed": 1}
    options |= {"output_dir": str(output), "disable_tqdm": True, "save_strategy": "no", **arguments}
    size = {} if mini_batch_size is None else {"mini_batch_size": mini_batch_size}
    return (GradCacheTrainer if size else ContrastiveTrainer)(
        loss_func=loss,
        is_vision_model=True,
        compute_symetric_loss=symmetric,
        model=model,
        args=TrainingArguments(**options),
        train_dataset=data,
        eval_dataset=None,
        data_collator=VisualRetrieverCollator(processor),
        **size,
    )


def step(trainer, batch) -> tuple:
    loss = trainer.compute_loss(trainer.model, {key: value.clone() for key, value in batch.items()})
    loss.backward()
    weights = trainer.model.named_parameters()
    return loss.detach(), {name: weight.grad for name, weight in weights if weight.grad is not None}


@pytest.mark.parametrize(
    "loss, symmetric",
    [
        (colpali_losses.ColbertLoss(temperature=0.2), False),
        (colpali_losses.ColbertPairwiseCELoss(), True),
        (colpali_losses.ColbertPairwiseNegativeCELoss(temperature=0.2), False),
    ],
    ids=["contrastive", "symmetric", "negatives"],
)
def test_a_step_of_the_trainer(folder, tmp_path, loss, symmetric):
    data = data_of("Negative" in type(loss).__name__)
    stock = trainer_of(folder, tmp_path, loss, data, symmetric)
    batch = stock.data_collator([data[row] for row in range(ROWS)])
    expected = step(stock, batch)
    sizes = []
    for enabled in (False, True):
        if enabled:
            pylate_fastmaxsim.enable()
        cached = trainer_of(folder, tmp_path, loss, data, symmetric, mini_batch_size=4)
        cached.model.register_forward_pre_hook(
            lambda _m, _a, given: sizes.append(len(given["input_ids"])), with_kwargs=True
        )
        assert_equal(step(cached, batch), expected, TOLERANCE)
    assert max(sizes) == 4 and len(sizes) == 2 * (14 if "neg_doc_input_ids" in batch else 8)


@pytest.mark.e2e
def test_the_curve_of_a_training_run(folder, tmp_path):
    def curve(**options) -> list[float]:
        loss = colpali_losses.ColbertLoss(temperature=0.2)
        trainer = trainer_of(folder, tmp_path, loss, data_of(), num_train_epochs=2, learning_rate=1e-2, **options)
        trainer.train()
        return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]

    stock = curve()
    pylate_fastmaxsim.enable()
    # Mini-batches of four and two: texts must not take the offsets of the pages before them.
    assert curve(mini_batch_size=4) == pytest.approx(stock, rel=1e-4)
    assert len(stock) == 2 and stock[0] != stock[1]


def test_by_hand_with_colpali(tmp_path):
    path = build_visual_model(tmp_path, "colpali")
    model, processor = ColPali.from_pretrained(path).double().train(), ColPaliProcessor.from_pretrained(path)
    model.model.tie_weights()
    pages = processor.process_images([page(number) for number in range(4)])
    queries = processor.process_texts(["a page", "another page of lines", "red", "blue lines on grey"])
    queries["token_type_ids"] = torch.zeros_like(queries["input_ids"])
    loss = colpali_losses.ColbertLoss()

    def run(model, with_second_passes=lambda loss: loss) -> tuple:
        weights.zero_grad()
        value = with_second_passes(loss(model(**queries), model(**pages)))
        value.backward()
        return value.detach(), {name: w.grad.clone() for name, w in weights.named_parameters() if w.grad is not None}

    weights = model
    stock = run(model)
    cached = GradCache(model, 3)
    assert_equal(run(cached, cached.with_second_passes), stock, TOLERANCE)
    with torch.no_grad():
        cached = GradCache(model, 3)
        assert not cached.with_second_passes(loss(cached(**queries), cached(**pages))).requires_grad


def test_what_cannot_be_divided_is_said(folder):
    model, processor = load(folder)
    pages = processor.process_images([page(0), page(1)])
    with pytest.raises(ValueError, match=r"GradCache: pixel_values must have one row for each of the 2 texts or pages"):
        GradCache(model, 1)(**{**pages, "pixel_values": pages["pixel_values"].flatten(0, 1)})
    with pytest.raises(ValueError, match="mini_batch_size must be at least 1, got 0"):
        GradCache(model, 0)
