"""What a recipe of a SPLADE may say: its own keys, and one sentence for those of other models."""

from __future__ import annotations

import pytest

from pylate_fastmaxsim.recipes.errors import RecipeError
from pylate_fastmaxsim.recipes.load import load_recipe
from tests.support.splade_recipe import tiny_splade
from tests.support.tiny_recipe import tiny, write

MINING = "{teacher: some/teacher, pairs: {source: hub, name: some/rows}}"


@pytest.mark.parametrize(
    ("override", "sentence"),
    [
        ("model.embedding_size=8", "model.embedding_size is not a key of a recipe with model.kind splade; "),
        ("model.document_length=8", "model.document_length is not a key of a recipe with model.kind splade; "),
        ("model.lora={target_modules: q}", "model.lora is not a key of a recipe with model.kind splade; "),
        ("loss.pooling={top_k: 2}", "loss.pooling is not a key of a recipe with model.kind splade; "),
        (
            "loss.mini_batch_size=2",
            "loss.mini_batch_size does not apply to loss.name contrastive, but to cached_contrastive and distillation.",
        ),
        (
            "loss.name=colbert",
            "loss.name must be one of contrastive, cached_contrastive, distillation, got 'colbert'.",
        ),
        (
            "loss.regularizers=null",
            "loss.regularizers is missing; model.kind splade needs the weights of its regulariz",
        ),
        ("loss.regularizers={}", "loss.regularizers.document_weight is missing; it must be a number."),
        ("loss.regularizers.query=l2", "loss.regularizers.query must be one of flops, l1, got 'l2'."),
        (
            "loss.regularizers.warmup_ratio=0",
            "loss.regularizers.warmup_ratio must be a number greater than 0 and at most 1, got 0.0.",
        ),
        (
            "loss.regularizers={document_weight: 1, document: l1, document_threshold: 3}",
            "loss.regularizers.document_threshold applies to the regularizer flops only.",
        ),
        (
            "loss={name: distillation, objective: margin_mse, temperature: 2, regularizers: {document_weight: 1}}",
            "loss.temperature does not apply to loss.objective margin_mse, which compares scores as they are.",
        ),
        ("training.query_learning_rate=0.1", "training.query_learning_rate applies to model.inference_free only."),
        (
            "fast.fused_head=false",
            "fast.fused_head is not a key of a recipe with model.kind splade; allowed here: enabled, ",
        ),
        ("fast.stock_masking=true", "fast.stock_masking is not a key of a recipe with model.kind splade; "),
        (
            "training.log_gradient_concentration=5",
            "training.log_gradient_concentration is not a key of a recipe with model.kind splade; ",
        ),
        (
            "evaluation={beir: a/b, corpus_format: int8}",
            "evaluation.corpus_format is not a key of a recipe with model.kind splade; ",
        ),
        (
            f"mining={MINING}",
            "mining is not a key of a recipe with model.kind splade; ",
        ),
    ],
)
def test_what_a_splade_does_not_take_is_refused_in_one_sentence(override, sentence, tmp_path):
    with pytest.raises(RecipeError) as error:
        load_recipe(write(tmp_path, tiny_splade(tmp_path)), [override])
    assert sentence in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("override", "sentence"),
    [
        ("model.max_seq_length=8", "model.max_seq_length is not a key of a recipe with model.kind colbert; "),
        ("model.inference_free=true", "model.inference_free is not a key of a recipe with model.kind colbert; "),
        (
            "loss.regularizers.document_weight=1",
            "loss.regularizers is not a key of a recipe with model.kind colbert; ",
        ),
        (
            "loss={name: distillation, objective: margin_mse}",
            "loss.objective is not a key of a recipe with model.kind colbert; ",
        ),
    ],
)
def test_its_own_keys_are_for_no_other_model(override, sentence, tmp_path):
    with pytest.raises(RecipeError) as error:
        load_recipe(write(tmp_path, tiny(tmp_path)), [override])
    assert sentence in str(error.value)
