"""Token counts that the collator of a SparseEncoder makes spare the search for tokens on a GPU, and reach no loss."""

import pytest
import torch

pytest.importorskip("sentence_transformers", minversion="5.1", reason="no SPLADE by the flag before it")

from sentence_transformers.sparse_encoder import SparseEncoderTrainer  # noqa: E402
from sentence_transformers.sparse_encoder.data_collator import SparseEncoderDataCollator  # noqa: E402
from sentence_transformers.sparse_encoder.training_args import SparseEncoderTrainingArguments  # noqa: E402

import pylate_fastmaxsim  # noqa: E402
from pylate_fastmaxsim.integrations.encoding.token_counts import TOKEN_TOTAL  # noqa: E402
from tests.support.splade_steps import splade_loss  # noqa: E402

ROWS = [
    {"query": "sea", "document": "sand and sea and sky", "negative": "a", "negative_1": "b c d"},
    {"query": "the sky", "document": "sand", "negative": "w x y z", "negative_1": "b"},
]


def collator(model):
    return SparseEncoderDataCollator(getattr(model, "preprocess", model.tokenize))


def value_of(model, columns) -> torch.Tensor:
    return sum(splade_loss(model)([dict(column) for column in columns]).values())


def test_the_trainer_leaves_stocks_columns_and_no_search(model, packed, no_search, tmp_path):
    arguments = SparseEncoderTrainingArguments(output_dir=str(tmp_path), use_cpu=True, report_to="none")
    stock = collator(model)(ROWS)
    of_stock, _ = SparseEncoderTrainer(model, arguments).collect_features(stock)
    expected = value_of(model, of_stock)
    pylate_fastmaxsim.enable()
    trainer = SparseEncoderTrainer(model, arguments)
    batch = collator(model)(ROWS)
    assert batch.keys() - stock.keys() == {f"{column}_{TOKEN_TOTAL}" for column in ROWS[0]}
    columns, _ = trainer.collect_features(trainer._prepare_inputs(batch))
    assert [column.keys() for column in columns] == [column.keys() for column in of_stock]
    value_of(model, columns)  # the check on the first batch searches
    no_search()
    torch.testing.assert_close(value_of(model, columns), expected)


def test_features_that_a_column_has_of_another(model, packed, caplog):
    """The trainer gives ``negative`` what begins with its name: all that is of ``negative_1``, as ``1_input_ids``."""
    batch = collator(model)(ROWS)
    columns, _ = SparseEncoderTrainer(model, SparseEncoderTrainingArguments(use_cpu=True)).collect_features(batch)
    assert "1_input_ids" in columns[2]
    stock = value_of(model, columns)
    with pylate_fastmaxsim.enabled():
        torch.testing.assert_close(value_of(model, columns), stock)
    assert "Vocabulary logits" not in caplog.text and "calls of their own" not in caplog.text


def test_a_loop_without_the_trainer(model):
    """Counts are taken out before the model sees them, also where everything runs stock."""
    with pylate_fastmaxsim.enabled():
        batch = collator(model)(ROWS)
        column = {key.removeprefix("document_"): value for key, value in batch.items() if key.startswith("document_")}
        fast = model(dict(column))["sentence_embedding"]
        handle = model.register_forward_hook(lambda *_: None)
        stock = model(given := dict(column))["sentence_embedding"]
        handle.remove()
    assert TOKEN_TOTAL not in given
    torch.testing.assert_close(fast, stock)


class OfOnesOwn(SparseEncoderDataCollator):
    def __call__(self, features):
        return super().__call__(features)


def test_batches_without_counts(model, monkeypatch):
    """Of a collator of somebody's own, and where batches may be sent from process to process."""
    with pylate_fastmaxsim.enabled():
        batch = OfOnesOwn(getattr(model, "preprocess", model.tokenize))(ROWS)
        assert not any(TOKEN_TOTAL in key for key in batch)
        monkeypatch.setenv("WORLD_SIZE", "2")
        assert not any(TOKEN_TOTAL in key for key in collator(model)(ROWS))
