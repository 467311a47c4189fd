"""Whole training runs with the Sentence Transformers trainer, stock and ours."""

from __future__ import annotations

import logging

import pytest
import torch
from datasets import Dataset
from models import load_model, sentences
from pylate import losses
from pylate.models import ColBERT
from pylate.utils import ColBERTCollator
from sentence_transformers import SentenceTransformerTrainer, SentenceTransformerTrainingArguments
from transformers import Trainer

import pylate_fastmaxsim
from pylate_fastmaxsim.integrations.encoding import modes, token_counts
from pylate_fastmaxsim.integrations.encoding.batch import Documents

pytestmark = pytest.mark.e2e

ROWS, BATCH = 24, 6


def _pairs(columns=("positive", "negative")) -> Dataset:
    texts = {"query": sentences(ROWS, longest=8)}
    texts |= {column: sentences(ROWS, seed=1 + index) for index, column in enumerate(columns)}
    return Dataset.from_dict(texts)


def _candidates() -> Dataset:
    documents = sentences(4 * ROWS, seed=1)
    scores = torch.rand(ROWS, 4, generator=torch.Generator().manual_seed(0))
    return Dataset.from_dict(
        {
            "query": sentences(ROWS, longest=8),
            "documents": [documents[4 * row : 4 * row + 4] for row in range(ROWS)],
            "label": scores.tolist(),
        }
    )


def train(
    model: ColBERT,
    loss,
    data: Dataset,
    folder,
    trainer_class=SentenceTransformerTrainer,
    collator_class=ColBERTCollator,
    **arguments,
) -> list[float]:
    """The loss of each step."""
    options = {
        "output_dir": str(folder),
        "num_train_epochs": 2,
        "per_device_train_batch_size": BATCH,
        "per_device_eval_batch_size": BATCH,
        "learning_rate": 1e-3,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": [],
        "disable_tqdm": True,
        "use_cpu": True,
        "seed": 1,
    }
    trainer = trainer_class(
        model=model,
        args=SentenceTransformerTrainingArguments(**{**options, **arguments}),
        train_dataset=data,
        eval_dataset=data,
        loss=loss,
        data_collator=collator_class(tokenize_fn=model.tokenize),
    )
    trainer.train()
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


@pytest.mark.parametrize(
    "loss_class, options, data",
    [
        (losses.Contrastive, {"temperature": 0.1}, _pairs()),
        (losses.CachedContrastive, {"mini_batch_size": 4}, _pairs()),
        (losses.Distillation, {}, _candidates()),
    ],
    ids=["contrastive", "cached", "distillation"],
)
def test_loss_curves(encoder, mode, tmp_path, loss_class, options, data, monkeypatch):
    searches = []
    from_columns = Documents.from_columns.__func__

    def recording(cls, columns):
        searches.append([token_counts.known_total(column) is None for column in columns])
        return from_columns(cls, columns)

    def curve(**arguments):
        # Its local layers see all of a query, so that queries are encoded with packed documents.
        model = load_model(encoder("modernbert", local_attention=24))
        return train(model, loss_class(model, **options), data, tmp_path, **arguments)

    stock = curve()
    monkeypatch.setattr(Documents, "from_columns", classmethod(recording))
    pylate_fastmaxsim.enable(stock_masking=True)
    ours = curve(dataloader_num_workers=2, eval_strategy="epoch")
    assert len(ours) == 2 * ROWS // BATCH
    assert ours == pytest.approx(stock, rel=2e-3, abs=2e-3)
    assert stock[-1] < stock[0]
    # Workers found the tokens of every batch; only the documents of the trial, in training and in evaluation, were
    # searched: as they are, as often as makes a long row, and once more with queries.
    joint = mode == "packed" and loss_class is not losses.CachedContrastive
    assert [set(found.values()) for found in modes.joined.values()] == [{True}] * joint
    assert sum(any(missing) for missing in searches) == (6 if joint else 4)


class PicksRows(losses.Contrastive):
    """Scores every second query only, and looks at all texts in one column."""

    def forward(self, sentence_features, labels=None):
        columns = list(sentence_features)
        self.widest = {key: torch.cat([column[key] for column in columns[1:]]) for key in columns[1]}
        rows = torch.arange(0, len(columns[0]["input_ids"]), 2)
        return super().forward([{key: value[rows] for key, value in column.items()} for column in columns], labels)


# The trainer gives a column all keys that begin with its name: `negative` also gets what belongs to `negative_1`.
@pytest.mark.parametrize("columns", [("positive", "negative"), ("positive", "negative", "negative_1")], ids=len)
def test_a_loss_that_picks_and_joins_rows(columns, encoder, mode, tmp_path):
    def curve():
        model = load_model(encoder("modernbert"))
        return train(model, PicksRows(model, temperature=0.1), _pairs(columns=columns), tmp_path)

    stock = curve()
    pylate_fastmaxsim.enable(stock_masking=True)
    assert curve() == pytest.approx(stock, rel=2e-3, abs=2e-3)


class FromBehind(SentenceTransformerTrainer):
    """Reorders all rows of a batch before the loss."""

    def compute_loss(self, model, inputs, *args, **kwargs):
        rows = torch.arange(len(inputs["query_input_ids"])).flip(0)
        inputs = {key: value[rows] if isinstance(value, torch.Tensor) else value for key, value in inputs.items()}
        return super().compute_loss(model, inputs, *args, **kwargs)


def test_a_trainer_that_reorders_a_batch(encoder, mode, tmp_path):
    def curve():
        model = load_model(encoder("modernbert"))
        loss = losses.Contrastive(model, temperature=0.1)
        return train(model, loss, _pairs(), tmp_path, trainer_class=FromBehind, eval_strategy="epoch")

    stock = curve()
    pylate_fastmaxsim.enable(stock_masking=True)
    assert curve() == pytest.approx(stock, rel=2e-3, abs=2e-3)


class ItemsCollator(ColBERTCollator):
    def __call__(self, features):
        return [*super().__call__(features).items()]


class Items(SentenceTransformerTrainer):
    """Takes a batch as a list of keys and values."""

    def compute_loss(self, model, inputs, *args, **kwargs):
        return super().compute_loss(model, dict(inputs), *args, **kwargs)


class Batch(dict):
    """Knows how many tokens its columns have."""

    @property
    def lengths(self):
        return [int(mask.sum()) for key, mask in self.items() if key.endswith("_attention_mask")]


class BatchCollator(ColBERTCollator):
    def __call__(self, features):
        return Batch(super().__call__(features))


class ReadsLengths(SentenceTransformerTrainer):
    def compute_loss(self, model, inputs, *args, **kwargs):
        assert len(inputs.lengths) == 3 and len(inputs) > 6
        return super().compute_loss(model, inputs, *args, **kwargs)


@pytest.mark.parametrize(("trainer", "collator"), [(Items, ItemsCollator), (ReadsLengths, BatchCollator)])
def test_a_batch_of_another_type(encoder, mode, tmp_path, trainer, collator):
    def curve():
        model = load_model(encoder("modernbert"))
        loss = losses.Contrastive(model, temperature=0.1)
        return train(model, loss, _pairs(), tmp_path, trainer, collator)

    stock = curve()
    pylate_fastmaxsim.enable(stock_masking=True)
    assert curve() == pytest.approx(stock, rel=2e-3, abs=2e-3)


def test_what_replaces_the_preparation_of_all_trainers_is_called(encoder, tmp_path, monkeypatch):
    model, prepare, called = load_model(encoder("modernbert")), Trainer._prepare_inputs, []

    def counted(self, inputs):
        called.append(None)
        return prepare(self, inputs)

    pylate_fastmaxsim.enable()
    monkeypatch.setattr(Trainer, "_prepare_inputs", counted)
    curve = train(model, losses.Contrastive(model, temperature=0.1), _pairs(), tmp_path)
    assert len(called) == len(curve)


def test_several_datasets_with_a_loss_each(encoder, tmp_path):
    def curve():
        model = load_model(encoder("modernbert"))
        data = {"triplets": _pairs(), "scored": _candidates(), "pairs": _pairs(columns=("positive",))}
        loss = {
            "triplets": losses.Contrastive(model, temperature=0.1),
            "scored": losses.Distillation(model),
            "pairs": losses.CachedContrastive(model, mini_batch_size=2),
        }
        return train(model, loss, data, tmp_path, multi_dataset_batch_sampler="round_robin")

    stock = curve()
    assert len(stock) == 3 * 2 * ROWS // BATCH
    pylate_fastmaxsim.enable(stock_masking=True)
    assert curve() == pytest.approx(stock, rel=2e-3, abs=2e-3)


def test_mixed_precision_and_gradient_checkpointing(encoder, packed, tmp_path, caplog):
    def curve():
        model = load_model(encoder("modernbert"))
        return train(
            model,
            losses.Contrastive(model, temperature=0.1),
            _pairs(),
            tmp_path,
            bf16=True,
            gradient_checkpointing=True,
            gradient_checkpointing_kwargs={"use_reentrant": False},
        )

    stock = curve()
    pylate_fastmaxsim.enable(stock_masking=True)
    with caplog.at_level(logging.INFO, "pylate_fastmaxsim"):
        assert curve() == pytest.approx(stock, rel=0.05, abs=0.05)
    assert "not packed" not in caplog.text


@pytest.mark.smoke
def test_enabled_between_building_and_training(encoder, packed, tmp_path):
    def built():
        model = load_model(encoder("bert"))
        return model, losses.Contrastive(model, temperature=0.1)

    stock = train(*built(), _pairs(), tmp_path)
    model, loss = built()
    pylate_fastmaxsim.enable(stock_masking=True)
    assert train(model, loss, _pairs(), tmp_path) == pytest.approx(stock, rel=2e-3)
    assert set(modes.chosen[model].values()) == {"packed"}


@pytest.mark.parametrize("by_the_trainer", [True, False], ids=["torch_compile=True", "model.compile()"])
def test_compiled_model(encoder, packed, tmp_path, by_the_trainer):
    def curve(compiled, **arguments):
        model = load_model(encoder("bert", num_hidden_layers=1))
        if compiled and not by_the_trainer:
            model.compile(backend="aot_eager")
        curve = train(model, losses.Contrastive(model), _pairs(), tmp_path, max_steps=3, **arguments)
        return model, curve

    _, stock = curve(False)
    torch._dynamo.reset()
    pylate_fastmaxsim.enable(stock_masking=True)
    arguments = {"torch_compile": True, "torch_compile_backend": "aot_eager"} if by_the_trainer else {}
    model, ours = curve(True, **arguments)
    torch._dynamo.reset()
    assert ours == pytest.approx(stock, rel=2e-3)
    assert set(modes.chosen[model].values()) == {"packed"}


def test_a_checkpoint_is_an_ordinary_model(encoder, packed, tmp_path):
    model = load_model(encoder("modernbert"))
    pylate_fastmaxsim.enable()
    arguments = {"save_strategy": "steps", "save_steps": 4, "max_steps": 4}
    train(model, losses.Contrastive(model), _pairs(), tmp_path, **arguments)
    pylate_fastmaxsim.disable()
    checkpoint = tmp_path / "checkpoint-4"
    for path in checkpoint.rglob("*.json"):
        assert "fastmaxsim" not in path.read_text()
    again = ColBERT(model_name_or_path=str(checkpoint), device="cpu")
    texts = sentences(4)
    for own, other in zip(again.encode(texts, is_query=False), model.eval().encode(texts, is_query=False), strict=True):
        assert own == pytest.approx(other, abs=1e-5)
