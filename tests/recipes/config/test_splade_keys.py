"""What a recipe of a SPLADE may say: its own keys, and one sentence for those of other models."""

from __future__ import annotations

import pytest
from splade_recipe import tiny_splade
from tiny_recipe import tiny, write

from pylate_fastmaxsim.recipes.errors import RecipeError
from pylate_fastmaxsim.recipes.load import load_recipe

NOT_THE_LOSS = (
    "does not apply to the contrastive loss of a splade, which takes gather_across_devices, regularizers, temp"
)
MINING = "{teacher: some/teacher, pairs: {source: hub, name: some/rows}}"


@pytest.mark.parametrize(
    ("override", "sentence"),
    [
        ("model.embedding_size=8", "model.embedding_size does not apply to model.kind splade."),
        ("model.document_length=8", "model.document_length does not apply to model.kind splade."),
        ("model.lora={target_modules: q}", "model.lora does not apply to model.kind splade."),
        ("loss.pooling={top_k: 2}", f"loss.pooling {NOT_THE_LOSS}"),
        ("loss.mini_batch_size=2", f"loss.mini_batch_size {NOT_THE_LOSS}"),
        (
            "loss.name=colbert",
            "loss.name must be one of contrastive, cached_contrastive, distillation with model.kind ",
        ),
        (
            "loss.regularizers=null",
            "loss.regularizers is missing; model.kind splade needs the weights of its regulariz",
        ),
        ("loss.regularizers={}", "loss.regularizers.document_weight is missing; it must be a number."),
        ("loss.regularizers.query=l2", "loss.regularizers.query must be one of flops, l1, got 'l2'."),
        ("loss.regularizers.warmup_ratio=0", "loss.regularizers.warmup_ratio must be greater than 0, got 0.0."),
        (
            "loss.regularizers={document_weight: 1, document: l1, document_threshold: 3}",
            "loss.regularizers.document_threshold applies to the regularizer flops only.",
        ),
        (
            "loss={name: distillation, objective: margin_mse, temperature: 2, regularizers: {document_weight: 1}}",
            "loss.temperature does not apply to loss.objective margin_mse, which compares scores as they are.",
        ),
        ("training.query_learning_rate=0.1", "training.query_learning_rate applies to model.inference_free only."),
        ("fast.fused_head=false", "fast.fused_head is not a key of a recipe; allowed here: enabled, padding_free, "),
        ("fast.stock_masking=true", "fast.stock_masking does not apply to model.kind splade."),
        (
            "training.log_gradient_concentration=5",
            "training.log_gradient_concentration does not apply to model.kind spl",
        ),
        (
            "evaluation={beir: a/b, corpus_format: int8}",
            "evaluation.corpus_format does not apply to model.kind splade.",
        ),
        (
            f"mining={MINING}",
            "mining does not apply to model.kind splade: mine with a colbert, and distil what that wri",
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
        ("model.max_seq_length=8", "model.max_seq_length does not apply to model.kind colbert."),
        ("model.inference_free=true", "model.inference_free does not apply to model.kind colbert."),
        (
            "loss.regularizers.document_weight=1",
            "loss.regularizers does not apply to the contrastive loss, which takes ",
        ),
        (
            "loss={name: distillation, objective: margin_mse}",
            "loss.objective does not apply to the distillation loss, ",
        ),
    ],
)
def test_its_own_keys_are_for_no_other_model(override, sentence, tmp_path):
    with pytest.raises(RecipeError) as error:
        load_recipe(write(tmp_path, tiny(tmp_path)), [override])
    assert sentence in str(error.value)
