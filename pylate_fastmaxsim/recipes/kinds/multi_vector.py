"""MultiVectorEncoders: late interaction of Sentence Transformers 6."""

from typing import Any

import torch
from sentence_transformers import MultiVectorEncoder, MultiVectorEncoderTrainer, MultiVectorEncoderTrainingArguments
from sentence_transformers.multi_vector_encoder import MultiVectorEncoderDataCollator, losses
from sentence_transformers.multi_vector_encoder.evaluation import MultiVectorNanoBEIREvaluator
from torch import Tensor, nn

from pylate_fastmaxsim.recipes.config.kinds import MultiVectorLoss, MultiVectorSection
from pylate_fastmaxsim.recipes.errors import RecipeError
from pylate_fastmaxsim.recipes.kind import kl_divergence
from pylate_fastmaxsim.recipes.kinds.texts import SentenceTransformersKind
from pylate_fastmaxsim.recipes.models.load import encoder_of, has_projection, model_type
from pylate_fastmaxsim.recipes.pooling import score_metric
from pylate_fastmaxsim.recipes.trainers.sharded import TextTrainerMixin

# The tokens of a ColBERT's query, where neither the recipe nor the checkpoint says how many.
EXPANDED_LENGTH = 32
# Keys of what the first module does with texts.
TEXT_KEYS = ("query_length", "document_length", "do_query_expansion", "attend_to_expansion_tokens")


class MultiVectorTrainer(TextTrainerMixin, MultiVectorEncoderTrainer):
    """The trainer of MultiVectorEncoders, which saves and resumes as that of the other text recipes."""


class MultiVector(SentenceTransformersKind):
    """``model.kind: multi_vector``."""

    arguments_class = MultiVectorEncoderTrainingArguments
    nano_beir_evaluator = MultiVectorNanoBEIREvaluator
    recipe_trainer = MultiVectorTrainer
    collator_class = MultiVectorEncoderDataCollator
    score_attribute = "similarity_fct"

    def load(self, section: MultiVectorSection, device: torch.device | str, key: str, base: str) -> MultiVectorEncoder:
        """A model that Sentence Transformers or PyLate has saved, or one made of an encoder."""
        name = section.name_or_path
        if model_type(name) == "SparseEncoder":  # of which Sentence Transformers would take the encoder
            raise RecipeError(
                f"{key} {name} does not fit model.kind multi_vector: it is a SparseEncoder, which model.kind splade trains."
            )
        model = self.from_encoder(section, device)
        sizes = [module.out_features for module in _projections(model)][-1:]
        if section.embedding_size not in (None, *sizes):
            allowed = " or ".join([*map(str, sizes), "null"])
            raise RecipeError(
                f"model.embedding_size must be {allowed}, because {key} {name} has a projection already, got "
                f"{section.embedding_size}."
            )
        return model

    def from_encoder(self, section: MultiVectorSection, device: torch.device | str) -> MultiVectorEncoder:
        options: dict[str, Any] = {}
        if section.config_kwargs:
            options["config_kwargs"] = dict(section.config_kwargs)
        if section.attn_implementation is not None:
            options["model_kwargs"] = {"attn_implementation": section.attn_implementation}
        name = section.name_or_path
        model = MultiVectorEncoder(name, device=str(device), trust_remote_code=section.trust_remote_code, **options)
        if section.embedding_size is not None and not has_projection(name):
            for projection in _projections(model):  # the one that was added, of another size
                projection.linear = nn.Linear(
                    projection.in_features, section.embedding_size, bias=False, device=model.device
                )
                projection.out_features = section.embedding_size
        _set_lengths(section, model)
        return model

    def build_loss(self, section: MultiVectorLoss, model: MultiVectorEncoder) -> nn.Module:
        options = section.options
        temperature, objective = options.pop("temperature", 1.0), options.pop("objective", None)
        distillation = section.name == "distillation"
        if section.pooling is not None:
            options["similarity_fct"] = score_metric(section.pooling, own_documents=distillation)
        if not distillation:
            ranking = losses.MultiVectorMultipleNegativesRankingLoss
            if section.name == "cached_contrastive":
                ranking = losses.CachedMultiVectorMultipleNegativesRankingLoss
            return ranking(model, scale=1 / temperature, **options)
        if objective == "margin_mse":
            return losses.MultiVectorMarginMSELoss(model, **options)
        return losses.MultiVectorDistillKLDivLoss(model, temperature=temperature, **options)

    def divergence(self, loss: MultiVectorLoss, scores: Tensor, teacher: Tensor) -> Tensor:
        """Of scores divided by the temperature of the loss, times the square of that."""
        return kl_divergence(scores, teacher, loss.temperature or 1.0)

    def counted_module(self, model: MultiVectorEncoder) -> nn.Module:
        # Not of the encoder: Sentence Transformers calls its method forward, which runs no hooks.
        return encoder_of(model).get_input_embeddings()


KIND = MultiVector()


def _projections(model: MultiVectorEncoder) -> list[nn.Module]:
    return [module for module in model if hasattr(module, "out_features")]


def _set_lengths(section: MultiVectorSection, model: MultiVectorEncoder) -> None:
    """Set the lengths of texts and the query expansion of a section; null keeps those of the checkpoint."""
    given = [key for key in TEXT_KEYS if getattr(section, key) is not None]
    transformer = model[0]
    if given and not hasattr(transformer, "query_expansion"):
        raise RecipeError(
            f"model.{given[0]} must be null for {section.name_or_path}, which begins with a {type(transformer).__name__} and "
            "not with a Transformer."
        )
    if section.document_length is not None:
        transformer.document_length = section.document_length
    if not {"query_length", "do_query_expansion", "attend_to_expansion_tokens"}.intersection(given):
        return
    expansion, length = transformer.query_expansion, section.query_length
    if section.do_query_expansion is False:
        expansion = None
    elif section.do_query_expansion or expansion is not None:
        had = expansion or {"strategy": "fixed", "length": transformer.query_length or EXPANDED_LENGTH}
        attend = section.attend_to_expansion_tokens
        expansion = {**had, "attend": had.get("attend", False) if attend is None else attend}
    if expansion is not None and expansion["strategy"] == "fixed":
        # All queries have this length, and no other one may be below it.
        expansion["length"], length = length or expansion["length"], None
        transformer.query_length = None
    transformer.query_length = length or transformer.query_length
    transformer.query_expansion = expansion
