"""SPLADE models: SparseEncoders of Sentence Transformers whose pooling is SpladePooling."""

from typing import Any

import torch
from sentence_transformers import SparseEncoder
from sentence_transformers.sparse_encoder import SparseEncoderTrainer, SparseEncoderTrainingArguments, losses
from sentence_transformers.sparse_encoder.callbacks.splade_callbacks import SpladeRegularizerWeightSchedulerCallback
from sentence_transformers.sparse_encoder.data_collator import SparseEncoderDataCollator
from sentence_transformers.sparse_encoder.evaluation import SparseNanoBEIREvaluator
from torch import Tensor, nn
from transformers import ModernBertForMaskedLM, TrainerCallback

from pylate_fastmaxsim.integrations.sparse_encoder.names import (
    MaskedLanguageModel,
    Router,
    SparseStaticEmbedding,
    SpladePooling,
    gives_logits,
)
from pylate_fastmaxsim.recipes.config.kinds import SpladeLoss, SpladeSection
from pylate_fastmaxsim.recipes.errors import RecipeError
from pylate_fastmaxsim.recipes.kinds.texts import SentenceTransformersKind
from pylate_fastmaxsim.recipes.models.load import encoder_of, require_inner_product
from pylate_fastmaxsim.recipes.trainers.sharded import TextTrainerMixin


class SpladeTrainer(TextTrainerMixin, SparseEncoderTrainer):
    """The trainer of sparse encoders, which saves and resumes as that of the other text recipes."""


class Splade(SentenceTransformersKind):
    """``model.kind: splade``."""

    arguments_class = SparseEncoderTrainingArguments
    recipe_trainer = SpladeTrainer
    collator_class = SparseEncoderDataCollator
    nano_beir_evaluator = SparseNanoBEIREvaluator
    encoder_class = ModernBertForMaskedLM

    def load(self, section: SpladeSection, device: torch.device | str, key: str, base: str) -> SparseEncoder:
        """A saved SparseEncoder, or one made of a masked language model."""
        name, model = section.name_or_path, self.from_encoder(section, device)
        modules = [module for module in model.modules() if isinstance(module, MaskedLanguageModel)]
        language_models = [module for module in modules if gives_logits(module)]
        if not language_models or not any(isinstance(module, SpladePooling) for module in model.modules()):
            raise RecipeError(
                f"{key} {name} must be a masked language model, or a SparseEncoder with SpladePooling, but has the modules "
                f"{', '.join(type(module).__name__ for module in model)}."
            )
        require_inner_product(model, key, name)
        if section.inference_free and not isinstance(model[0], Router):
            model = with_static_queries(model)
        elif isinstance(model[0], Router) and not section.inference_free:
            raise RecipeError(f"model.inference_free must be true for {key} {name}, which has a route for queries.")
        if section.max_seq_length is not None:
            for module in language_models:
                module.max_seq_length = section.max_seq_length
        return model

    def from_encoder(self, section: SpladeSection, device: torch.device | str) -> SparseEncoder:
        options = {"config_kwargs": dict(section.config_kwargs)} if section.config_kwargs else {}
        return SparseEncoder(
            section.name_or_path, device=str(device), trust_remote_code=section.trust_remote_code, **options
        )

    def callbacks(self, section: SpladeLoss, loss: losses.SpladeLoss) -> list[TrainerCallback]:
        """The schedule of the regularizers' weights."""
        weights = section.regularizers
        return [SpladeRegularizerWeightSchedulerCallback(loss, weights.schedule, weights.warmup_ratio)]

    def build_loss(self, section: SpladeLoss, model: SparseEncoder) -> losses.SpladeLoss:
        """``SpladeLoss`` or ``CachedSpladeLoss`` over the loss that a recipe names."""
        temperature = {} if section.temperature is None else {"temperature": section.temperature}
        if section.name != "distillation":
            main = losses.SparseMultipleNegativesRankingLoss(
                model,
                scale=1 / (section.temperature or 1.0),
                gather_across_devices=bool(section.gather_across_devices),
            )
        elif section.objective == "margin_mse":
            main = losses.SparseMarginMSELoss(model)
        else:
            main = losses.SparseDistillKLDivLoss(model, **temperature)
        weights = section.regularizers
        options: dict[str, Any] = {
            "document_regularizer_weight": weights.document_weight,
            "query_regularizer_weight": weights.query_weight,
        }
        for side in ("query", "document"):
            if getattr(weights, side) == "l1":
                options[f"{side}_regularizer"] = L1Regularizer()
            options[f"{side}_regularizer_threshold"] = getattr(weights, f"{side}_threshold")
        if section.name == "cached_contrastive" or section.mini_batch_size is not None:
            cached = {} if section.mini_batch_size is None else {"mini_batch_size": section.mini_batch_size}
            return losses.CachedSpladeLoss(model, main, **options, **cached)
        return losses.SpladeLoss(model, main, **options)

    def count(self, model: SparseEncoder, inputs: dict[str, Any]) -> dict[str, Any]:
        # Below a route for queries the encoder sees none.
        return super().count(model, inputs) | ({"query_tokens": 0} if isinstance(model[0], Router) else {})

    def counted_module(self, model: SparseEncoder) -> nn.Module:
        # Below the head, which the plugin passes over.
        return encoder_of(model).base_model


KIND = Splade()


def with_static_queries(model: SparseEncoder) -> SparseEncoder:
    """A model with these modules for documents, and for queries a weight of each token, at first 1."""
    # Not of the tokenizer's length: some encoders pad their vocabulary, and both sides need vectors of one size.
    queries = SparseStaticEmbedding(model.tokenizer, torch.ones(encoder_of(model).config.vocab_size))
    router = Router.for_query_document([queries], list(model))
    routed = SparseEncoder(modules=[router], device=str(model.device), similarity_fn_name="dot")
    routed.model_card_data.base_model = model.model_card_data.base_model
    return routed


class L1Regularizer(nn.Module):
    """The mean over texts of the sum of their weights, as a regularizer of ``SpladeLoss``."""

    def compute_loss_from_embeddings(self, embeddings: Tensor) -> Tensor:
        """A scalar of the vectors ``[N, V]``."""
        return torch.sum(embeddings.abs(), dim=-1).mean()
