"""PyLate's ColBERT models."""

import logging
from dataclasses import replace

import torch
from datasets import Dataset
from pylate import losses, models, utils
from pylate.evaluation import NanoBEIREvaluator
from torch import Tensor, nn
from transformers import Trainer, TrainingArguments

from pylate_fastmaxsim.recipes.config.kinds import ColBERTLoss, ColBERTSection
from pylate_fastmaxsim.recipes.config.schema import Recipe
from pylate_fastmaxsim.recipes.data.text import COLLATED_LABELS, check_names, fit_to_loss, query_named
from pylate_fastmaxsim.recipes.errors import RecipeError
from pylate_fastmaxsim.recipes.kind import kl_divergence
from pylate_fastmaxsim.recipes.kinds.texts import TextKind
from pylate_fastmaxsim.recipes.pooling import score_metric
from pylate_fastmaxsim.recipes.trainers.sharded import RecipeTrainer

logger = logging.getLogger(__name__)

LOSSES = {
    "contrastive": losses.Contrastive,
    "cached_contrastive": losses.CachedContrastive,
    "distillation": losses.Distillation,
}


class ColBERT(TextKind):
    """``model.kind: colbert``."""

    host = "PyLate"
    recipe_trainer = RecipeTrainer
    nano_beir_evaluator = NanoBEIREvaluator
    score_attribute = "score_metric"
    pads_queries = True

    def load(self, section: ColBERTSection, device: torch.device | str, key: str, base: str) -> models.ColBERT:
        model = self.from_encoder(section, device)
        if section.embedding_size is not None and len(model) > 2:
            # PyLate only warns of the random projection that it has added after a trained one of another size.
            # A checkpoint may have several of its own.
            own = self.from_encoder(replace(section, embedding_size=None), "cpu")
            if len(own) < len(model):
                size = own[-1].out_features
                raise RecipeError(
                    f"model.embedding_size must be {size} or null, because {key} {section.name_or_path} ends with a "
                    f"projection of that size, got {section.embedding_size}."
                )
        return model

    def from_encoder(self, section: ColBERTSection, device: torch.device | str) -> models.ColBERT:
        return models.ColBERT(
            model_name_or_path=section.name_or_path,
            device=str(device),
            embedding_size=section.embedding_size,
            query_length=section.query_length,
            document_length=section.document_length,
            do_query_expansion=section.do_query_expansion,
            attend_to_expansion_tokens=section.attend_to_expansion_tokens,
            config_kwargs=dict(section.config_kwargs),
            trust_remote_code=section.trust_remote_code,
        )

    def fit_columns(self, recipe: Recipe, dataset: Dataset) -> Dataset:
        dataset = query_named(dataset)
        check_names(dataset.column_names)
        return fit_to_loss(recipe, dataset, COLLATED_LABELS)

    def build_trainer(
        self, loss: ColBERTLoss, model: models.ColBERT, rows: Dataset, arguments: TrainingArguments
    ) -> Trainer:
        # The columns of distillation end with the scores.
        scaled = loss.name == "distillation" and loss.normalize_scores is not False
        if scaled and len(next(iter(rows))[rows.column_names[-1]]) == 2:
            logger.warning(
                "loss.normalize_scores scales the model's scores of each query to [0, 1], and with two documents to 0 and 1 "
                "whatever they are: nothing is learned. Set it to false, or use more documents (data.n_ways)."
            )
        return super().build_trainer(loss, model, rows, arguments)

    def build_collator(self, model: models.ColBERT, rows: Dataset) -> utils.ColBERTCollator:
        return utils.ColBERTCollator(tokenize_fn=model.tokenize)

    def build_loss(self, section: ColBERTLoss, model: models.ColBERT) -> nn.Module:
        options = section.options
        if section.pooling is not None:
            options["score_metric"] = score_metric(section.pooling, own_documents=section.name == "distillation")
        return LOSSES[section.name](model=model, **options)

    def divergence(self, loss: ColBERTLoss, scores: Tensor, teacher: Tensor) -> Tensor:
        """Of the model's scores scaled to [0, 1] for each query, unless ``loss.normalize_scores`` is false."""
        if loss.normalize_scores is not False:
            lowest, highest = scores.aminmax(dim=1, keepdim=True)
            scores = (scores - lowest) / (highest - lowest + 1e-8)
        return kl_divergence(scores, teacher)

    def counted_module(self, model: models.ColBERT) -> nn.Module:
        return model[0].auto_model


KIND = ColBERT()
