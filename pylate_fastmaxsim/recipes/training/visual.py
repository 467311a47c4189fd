"""Training of models of pages with colpali-engine's trainer."""

from __future__ import annotations

from typing import Any

from colpali_engine import loss as losses
from colpali_engine.collators import VisualRetrieverCollator
from colpali_engine.data import ColPaliEngineDataset
from colpali_engine.trainer.contrastive_trainer import ContrastiveTrainer
from datasets import Dataset
from sentence_transformers import SentenceTransformerTrainingArguments
from transformers import TrainingArguments

from pylate_fastmaxsim.ops.pooled import LogSumExp, Max
from pylate_fastmaxsim.recipes.config.schema import LossSection, Recipe
from pylate_fastmaxsim.recipes.models.retriever import VisualRetriever
from pylate_fastmaxsim.recipes.training.callbacks import LogGradientConcentration
from pylate_fastmaxsim.recipes.training.sharded import WholeModelMixin
from pylate_fastmaxsim.tokens import TokenBatch

HOST = "colpali-engine"
# The collator needs the images; with adapters the inputs of a layer have no gradient.
ARGUMENTS = {"remove_unused_columns": False, "gradient_checkpointing_kwargs": {"use_reentrant": False}}
ARGUMENTS_CLASS = SentenceTransformerTrainingArguments
# colpali-engine's cards say nothing of the training or the evaluation.
CARD_TRAINER = None

LOSSES = {
    "colbert": losses.ColbertLoss,
    "colbert_pairwise_ce": losses.ColbertPairwiseCELoss,
    "colbert_sigmoid": losses.ColbertSigmoidLoss,
    "colbert_negative_ce": losses.ColbertNegativeCELoss,
    "colbert_pairwise_negative_ce": losses.ColbertPairwiseNegativeCELoss,
}

# Pairs of which gradients are measured: few, because each page has hundreds of tokens.
MEASURED_PAIRS = 8


def build_trainer(
    loss: LossSection,
    retriever: VisualRetriever,
    rows: Dataset,
    arguments: TrainingArguments,
    trainer_class: type[PageTrainer] | None,
) -> PageTrainer:
    """colpali-engine's trainer, with its collator and the loss of the recipe."""
    query, page, *negatives = rows.column_names
    columns = {"query_column_name": query, "pos_target_column_name": page}
    if negatives:
        columns["neg_target_column_name"] = negatives[0]
    return (trainer_class or PageTrainer)(
        loss_func=LOSSES[loss.name](**loss.options),
        is_vision_model=True,
        retriever=retriever,
        args=arguments,
        train_dataset=ColPaliEngineDataset(rows, **columns),
        eval_dataset=None,
        data_collator=VisualRetrieverCollator(retriever.processor),
    )


def gradient_concentration_logger(recipe: Recipe, trainer: PageTrainer) -> LogGradientConcentration:
    """The callback of ``training.log_gradient_concentration``: of scores only, of the first queries and pages."""
    rows = [trainer.train_dataset[row] for row in range(min(MEASURED_PAIRS, len(trainer.train_dataset)))]
    queries = [row[ColPaliEngineDataset.QUERY_KEY] for row in rows]
    pages = [row[ColPaliEngineDataset.POS_TARGET_KEY][0] for row in rows]

    def encode_pairs() -> tuple[TokenBatch, TokenBatch]:
        model, processor = trainer.model.eval(), trainer.retriever.processor  # each step sets it to training again
        batches = processor.process_queries(queries), processor.process_images(pages)
        embeddings = (model(**batch.to(model.device)) for batch in batches)
        # Rows of padding are zero.
        return tuple(TokenBatch.from_padded(part, (part != 0).any(dim=-1)) for part in embeddings)

    loss = trainer.loss_func
    return LogGradientConcentration(
        trainer,
        encode_pairs,
        recipe.training.log_gradient_concentration,
        pooling=LogSumExp(loss.tau) if loss.use_smooth_max else Max(),
        temperature=None,
    )


class PageTrainer(WholeModelMixin, ContrastiveTrainer):
    """colpali-engine's trainer, which hands back whole models, also under FSDP and DeepSpeed."""

    def __init__(self, *, retriever: VisualRetriever, **kwargs: Any) -> None:
        self.retriever = retriever
        super().__init__(model=retriever.model, **kwargs)

    def whole_model(self) -> VisualRetriever | None:
        """The model with all its weights. Every process must call this; of a sharded model only the main one gets it."""
        if not self.is_sharded:
            return self.retriever
        weights = self._gathered()
        if not self.args.should_save:
            return None
        # FSDP unties weights, and trains those that are used: ColPali's output head must not overwrite its embeddings.
        own = {name: weights[name] for name, _ in self._whole.named_parameters()}
        own |= {name: weights[name] for name, _ in self._whole.named_buffers() if name in weights}
        self._whole.load_state_dict(own, strict=False)
        return VisualRetriever(self._whole.to(self.args.device), self.retriever.processor)
