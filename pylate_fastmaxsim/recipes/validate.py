"""Check a recipe as a whole: keys that depend on each other, and files and packages on this machine."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from pylate_fastmaxsim.recipes.config.schema import (
    FIRST_STAGE_KEYS,
    LOSSES_WITH_NEGATIVES,
    POOLING_KEYS,
    SOURCE_KEYS,
    VISUAL_LOSSES,
    DataSection,
    EvaluationSection,
    FastSection,
    FirstStageSection,
    MiningSection,
    ModelSection,
    Recipe,
)
from pylate_fastmaxsim.recipes.data.docstrings import package_directory
from pylate_fastmaxsim.recipes.errors import RecipeError
from pylate_fastmaxsim.recipes.files.types import ENDINGS, file_type

VISUAL_LOSS_OPTIONS = {
    "temperature",
    "normalize_scores",
    "use_smooth_max",
    "tau",
    "pos_aware_negative_filtering",
    "filter_threshold",
    "filter_factor",
    "norm_tol",
    "max_batch_size",
}
VISUAL_MODEL_KEYS = ("kind", "name_or_path", "dtype", "attn_implementation", "max_visual_tokens", "lora")
SPLADE_MODEL_KEYS = (
    "max_seq_length",
    "inference_free",
    "kind",
    "name_or_path",
    "build",
    "config_kwargs",
    "trust_remote_code",
)
MULTI_VECTOR_MODEL_KEYS = (
    "kind",
    "name_or_path",
    "build",
    "embedding_size",
    "query_length",
    "document_length",
    "do_query_expansion",
    "attend_to_expansion_tokens",
    "config_kwargs",
    "trust_remote_code",
    "attn_implementation",
)
VISUAL_FAST_KEYS = ("enabled", "grad_filter")
SPLADE_FAST_KEYS = ("enabled", "padding_free", "compile")
MULTI_VECTOR_FAST_KEYS = ("enabled", "padding_free", "compile", "grad_filter")
LOSS_OPTIONS = {
    "contrastive": {"temperature", "size_average", "score_mini_batch_size", "gather_across_devices", "pooling"},
    "cached_contrastive": {
        "temperature",
        "size_average",
        "mini_batch_size",
        "score_mini_batch_size",
        "gather_across_devices",
        "pooling",
    },
    "distillation": {"size_average", "normalize_scores", "pooling"},
    **dict.fromkeys(VISUAL_LOSSES, VISUAL_LOSS_OPTIONS),
    **{name: VISUAL_LOSS_OPTIONS | {"in_batch_term_weight"} for name in LOSSES_WITH_NEGATIVES},
}
SPLADE_LOSS_OPTIONS = {
    "contrastive": {"temperature", "gather_across_devices", "regularizers"},
    "cached_contrastive": {"temperature", "gather_across_devices", "regularizers", "mini_batch_size"},
    "distillation": {"temperature", "objective", "regularizers", "mini_batch_size"},
}
MULTI_VECTOR_LOSS_OPTIONS = {
    "contrastive": {"temperature", "mini_batch_size", "score_mini_batch_size", "gather_across_devices", "pooling"},
    "cached_contrastive": {
        "temperature",
        "mini_batch_size",
        "mini_batch_num_tokens",
        "score_mini_batch_size",
        "gather_across_devices",
        "pooling",
    },
    "distillation": {"temperature", "objective", "mini_batch_size", "pooling"},
}
# Of kinds that do not train with PyLate or colpali-engine.
KIND_LOSS_OPTIONS = {"splade": SPLADE_LOSS_OPTIONS, "multi_vector": MULTI_VECTOR_LOSS_OPTIONS}


def check(recipe: Recipe) -> None:
    """Raise RecipeError if keys contradict each other, or if a file or package is missing."""
    _check_name(recipe.name)
    _check_model(recipe)
    _check_kind(recipe)
    _check_data(recipe.data, "data")
    if recipe.mining is not None:
        _check_data(recipe.mining.pairs, "mining.pairs")
        if recipe.mining.corpus is not None:
            _check_data(recipe.mining.corpus, "mining.corpus")
        _check_mining(recipe.mining)
    if recipe.data.source == "docstrings" and recipe.loss.name == "distillation":
        raise RecipeError("loss.name must be contrastive or cached_contrastive with data.source docstrings.")
    if recipe.data.source == "distillation" and recipe.loss.name != "distillation":
        raise RecipeError(f"loss.name must be distillation with data.source distillation, got {recipe.loss.name!r}.")
    if recipe.data.source == "distillation" and recipe.data.columns is not None:
        raise RecipeError("data.columns does not apply to data.source distillation, whose columns have fixed names.")
    for name in ("negatives_per_query", "negatives", "text_key"):
        # Distillation has passages in a collection only.
        applies = recipe.loss.name in ("contrastive", "cached_contrastive") or (
            name == "text_key" and recipe.data.collection
        )
        if getattr(recipe.data, name) is not None and not applies:
            raise RecipeError(f"data.{name} does not apply to the {recipe.loss.name} loss.")
    if recipe.data.streaming:
        _check_streaming(recipe)
    if recipe.data.n_ways is not None and recipe.loss.name != "distillation":
        raise RecipeError(f"data.n_ways does not apply to the {recipe.loss.name} loss.")
    if recipe.data.collection is not None and recipe.model.visual:
        raise RecipeError(f"data.collection does not apply to model.kind {recipe.model.kind}.")
    kind = recipe.model.kind
    options = KIND_LOSS_OPTIONS.get(kind, LOSS_OPTIONS)[recipe.loss.name]
    for option in dataclasses.fields(recipe.loss):
        if option.name == "name" or getattr(recipe.loss, option.name) is None:
            continue
        if option.name not in options:
            raise RecipeError(
                f"loss.{option.name} does not apply to the {recipe.loss.name} loss"
                f"{f' of a {kind}' if kind in KIND_LOSS_OPTIONS else ''}, which "
                f"takes {', '.join(sorted(options))}."
            )
    for option in ("temperature", "tau"):
        if getattr(recipe.loss, option) == 0:
            raise RecipeError(f"loss.{option} must be greater than 0, got 0.0.")
    if recipe.loss.pooling is not None:
        _check_pooling(recipe)
    if recipe.training.max_steps is None and recipe.training.num_train_epochs == 0:
        raise RecipeError("training.num_train_epochs must be greater than 0 where training.max_steps is not given.")
    _check_evaluation(recipe.evaluation)
    if recipe.evaluation.corpus_format is not None and recipe.loss.pooling is not None:
        raise RecipeError(
            "loss.pooling must be max with evaluation.corpus_format: no other pools compressed documents."
        )
    output = Path(recipe.output_dir)
    there = next(path for path in (output, *output.absolute().parents) if path.exists())
    if not there.is_dir():
        raise RecipeError(f"output_dir must be a directory or a path yet to be made, but {there} is a file.")


def _check_streaming(recipe: Recipe) -> None:
    if recipe.data.source not in ("hub", "files"):
        raise RecipeError(f"data.source must be hub or files with data.streaming, got {recipe.data.source!r}.")
    if recipe.training.max_steps is None:
        raise RecipeError("training.max_steps is missing; with data.streaming it says when training ends.")
    if recipe.evaluation.rows:
        raise RecipeError(
            "evaluation.rows must be 0 with data.streaming, whose rows are read once in passing: evaluate on evaluation.beir or "
            "evaluation.nano_beir."
        )
    for key, given in {
        "data.max_rows": recipe.data.max_rows is not None,
        "data.collection": recipe.data.collection is not None,
        "model.build": recipe.model.build is not None,
        "training.batch_sampler": recipe.training.batch_sampler != "batch_sampler",
        "training.log_gradient_concentration": recipe.training.log_gradient_concentration is not None,
    }.items():
        if given:
            raise RecipeError(f"{key} does not apply to data.streaming: it needs all rows at once.")
    if recipe.model.visual:
        raise RecipeError(f"data.streaming does not apply to model.kind {recipe.model.kind}.")


def _require_no_file(key: str, what: str, path: str | None) -> None:
    """Refuse a file in place of a folder or a name on the Hub."""
    if path is not None and Path(path).is_file():
        raise RecipeError(f"{key} must be {what} on the Hub or a directory, but {path} is a file.")


def _check_name(name: str) -> None:
    if Path(name).is_absolute() or ".." in Path(name).parts:
        raise RecipeError(f"name must be a name, not a path out of the folder of an index, got {name!r}.")


def _check_model(recipe: Recipe) -> None:
    model = recipe.model
    if sum(way is not None for way in (model.name_or_path, model.build, model.token_table)) != 1:
        raise RecipeError("model must have exactly one of name_or_path, build and token_table.")
    for key, path in {"name_or_path": model.name_or_path, "token_table": model.token_table}.items():
        _require_no_file(f"model.{key}", "a model", path)
        if path is not None and path.startswith(("/", ".", "~")) and not Path(path).is_dir():
            raise RecipeError(f"model.{key} must be a model on the Hub or a directory, but {path} is not there.")
    if model.build is not None and model.build.hidden_size % (2 * model.build.num_attention_heads):
        raise RecipeError(
            "model.build.hidden_size must be a multiple of 2 * num_attention_heads, "
            f"got {model.build.hidden_size} and {model.build.num_attention_heads}."
        )


def _check_kind(recipe: Recipe) -> None:
    """Refuse keys and losses of another kind of model."""
    model = recipe.model
    for field in dataclasses.fields(model):
        if model.kind == "colbert":
            applies = field.name not in (*VISUAL_MODEL_KEYS[2:], *SPLADE_MODEL_KEYS[:2])
        elif model.kind == "multi_vector":
            applies = field.name in MULTI_VECTOR_MODEL_KEYS
        else:
            applies = field.name in (VISUAL_MODEL_KEYS if model.visual else SPLADE_MODEL_KEYS)
        if not applies and getattr(model, field.name) != getattr(ModelSection(), field.name):
            raise RecipeError(f"model.{field.name} does not apply to model.kind {model.kind}.")
    if model.visual != (recipe.loss.name in VISUAL_LOSSES):
        allowed = VISUAL_LOSSES if model.visual else [name for name in LOSS_OPTIONS if name not in VISUAL_LOSSES]
        raise RecipeError(
            f"loss.name must be one of {', '.join(allowed)} with model.kind {model.kind}, got {recipe.loss.name!r}."
        )
    if recipe.training.query_learning_rate is not None and not model.inference_free:
        raise RecipeError("training.query_learning_rate applies to model.inference_free only.")
    if model.visual:
        _check_visual(recipe)
    if model.kind == "splade":
        _check_splade(recipe)
    if model.kind == "multi_vector":
        _check_multi_vector(recipe)


def _check_visual(recipe: Recipe) -> None:
    kind = recipe.model.kind
    if recipe.model.max_visual_tokens is not None and kind != "colqwen2":
        raise RecipeError(
            f"model.max_visual_tokens does not apply to model.kind {kind}, whose pages all have one size."
        )
    if recipe.data.source not in ("hub", "files"):
        raise RecipeError(f"data.source must be hub or files with model.kind {kind}, got {recipe.data.source!r}.")
    for key, given in {
        "training.batch_sampler": recipe.training.batch_sampler != "batch_sampler",
        "evaluation.beir": recipe.evaluation.beir is not None,
        "evaluation.nano_beir": recipe.evaluation.nano_beir is not None,
        "mining": recipe.mining is not None,
        **_other_fast_keys(recipe.fast, VISUAL_FAST_KEYS),
    }.items():
        if given:
            raise RecipeError(f"{key} does not apply to model.kind {kind}.")


def _other_fast_keys(fast: FastSection, own: tuple[str, ...]) -> dict[str, bool]:
    """Whether keys of ``fast`` that are not in ``own`` differ from their defaults."""
    return {
        f"fast.{field.name}": getattr(fast, field.name) != field.default
        for field in dataclasses.fields(FastSection)
        if field.name not in own
    }


def _check_splade(recipe: Recipe) -> None:
    if recipe.mining is not None:
        raise RecipeError(
            "mining does not apply to model.kind splade: mine with a colbert, and distil what that writes into the splade."
        )
    for key, given in {
        "training.log_gradient_concentration": recipe.training.log_gradient_concentration is not None,
        "evaluation.corpus_format": recipe.evaluation.corpus_format is not None,
        **_other_fast_keys(recipe.fast, SPLADE_FAST_KEYS),
    }.items():
        if given:
            raise RecipeError(f"{key} does not apply to model.kind splade.")
    regularizers = recipe.loss.regularizers
    if regularizers is None:
        raise RecipeError("loss.regularizers is missing; model.kind splade needs the weights of its regularizers.")
    _check_objective(recipe)
    if regularizers.warmup_ratio == 0:
        raise RecipeError("loss.regularizers.warmup_ratio must be greater than 0, got 0.0.")
    for side in ("query", "document"):
        if getattr(regularizers, f"{side}_threshold") is not None and getattr(regularizers, side) != "flops":
            raise RecipeError(f"loss.regularizers.{side}_threshold applies to the regularizer flops only.")


def _check_multi_vector(recipe: Recipe) -> None:
    for key, given in _other_fast_keys(recipe.fast, MULTI_VECTOR_FAST_KEYS).items():
        if given:
            raise RecipeError(f"{key} does not apply to model.kind multi_vector.")
    _check_objective(recipe)


def _check_objective(recipe: Recipe) -> None:
    if recipe.loss.objective != "margin_mse":
        return
    if recipe.loss.temperature is not None:
        raise RecipeError(
            "loss.temperature does not apply to loss.objective margin_mse, which compares scores as they are."
        )
    if recipe.loss.pooling is not None:
        raise RecipeError("loss.pooling must be max with loss.objective margin_mse.")


def _check_pooling(recipe: Recipe) -> None:
    pooling = recipe.loss.pooling
    given = [name for name in POOLING_KEYS if getattr(pooling, name) is not None]
    if len(given) != 1:
        raise RecipeError(
            f"loss.pooling must have exactly one of {', '.join(POOLING_KEYS)}, got {' and '.join(given) or 'none'}; replace "
            "it as a whole with --set loss.pooling={top_k: 4}, for example."
        )
    if (pooling.start is None) != (pooling.schedule is None):
        missing = "start" if pooling.start is None else "schedule"
        raise RecipeError(
            f"loss.pooling.{missing} is missing; a schedule has a start, the value in the first step, and a schedule, linear "
            "or cosine."
        )
    for name in (*given, "start"):
        value = getattr(pooling, name)
        if value is not None and not 1e-30 <= value <= 1e30:
            raise RecipeError(f"loss.pooling.{name} must be a number from 1e-30 to 1e30, got {value}.")
    if pooling.top_k is not None and pooling.start is not None and not pooling.start.is_integer():
        raise RecipeError(f"loss.pooling.start must be an integer with top_k, got {pooling.start}.")
    if recipe.fast.stock_masking:
        raise RecipeError(
            "fast.stock_masking must be false with loss.pooling: masked tokens are left out of every pooling but the "
            "maximum."
        )


def _check_evaluation(evaluation: EvaluationSection) -> None:
    if (evaluation.rows > 0) + (evaluation.beir is not None) + (evaluation.nano_beir is not None) > 1:
        raise RecipeError("evaluation must have at most one of rows, beir and nano_beir.")
    _require_no_file("evaluation.beir", "a collection", evaluation.beir)
    if evaluation.corpus_format is not None and evaluation.beir is None:
        raise RecipeError("evaluation.corpus_format applies to evaluation.beir, which is missing.")
    if evaluation.nano_beir is not None:
        # Imports datasets, which takes seconds.
        from pylate_fastmaxsim.recipes.evaluation.nano_beir import check_names

        check_names(evaluation.nano_beir)


def _check_mining(mining: MiningSection) -> None:
    _require_no_file("mining.teacher", "a model", mining.teacher)
    for section, data in {"mining.pairs": mining.pairs, "mining.corpus": mining.corpus}.items():
        if data is not None and data.source not in ("hub", "files"):
            raise RecipeError(f"{section}.source must be hub or files, got {data.source!r}.")
    if mining.range_min + mining.num_negatives > mining.range_max:
        raise RecipeError(
            "mining.range_max must be at least range_min + num_negatives, "
            f"got {mining.range_max}, {mining.range_min} and {mining.num_negatives}."
        )
    if mining.first_stage is not None:
        _check_first_stage(mining.first_stage)


def _check_first_stage(first: FirstStageSection) -> None:
    own = FIRST_STAGE_KEYS[first.kind]
    for field in dataclasses.fields(first):
        if field.name not in ("kind", "k", *own) and getattr(first, field.name) != field.default:
            raise RecipeError(
                f"mining.first_stage.{field.name} does not apply to mining.first_stage.kind {first.kind}, which takes "
                f"{' and '.join(('k', *own))}."
            )
    if "model" in own and first.model is None:
        raise RecipeError(f"mining.first_stage.model is missing; mining.first_stage.kind {first.kind} needs it.")
    _require_no_file("mining.first_stage.model", "a model", first.model)


def _check_data(data: DataSection, section: str) -> None:
    own = SOURCE_KEYS[data.source]
    for name in sorted(set().union(*SOURCE_KEYS.values()).difference(own)):
        if getattr(data, name) is not None:
            raise RecipeError(
                f"{section}.{name} does not apply to {section}.source {data.source}, which takes {', '.join(own)}."
            )
    required = own[0]
    if getattr(data, required) is None:
        raise RecipeError(f"{section}.{required} is missing; {section}.source {data.source} needs it.")
    if section != "data" and data.streaming:
        raise RecipeError(f"{section}.streaming does not apply to mining, which needs all texts.")
    for name in ("negatives", "negatives_per_query", "n_ways", "collection", "text_key"):
        if section not in ("data", "mining.pairs" if name == "text_key" else "") and getattr(data, name) is not None:
            raise RecipeError(f"{section}.{name} does not apply to mining.")
    _require_no_file(f"{section}.name", "data", data.name)
    for name in ("files", "queries", "collection"):
        given = getattr(data, name) or []
        for file in given if name == "files" else [given] if given else []:
            if file_type(file) is None:
                raise RecipeError(f"{section}.{name} must end in {ENDINGS}, got {file}.")
            if not Path(file).is_file():
                raise RecipeError(f"{section}.{name}: {file} is not a file.")
    if len({file_type(file).removesuffix(".gz") for file in data.files or []}) > 1:
        raise RecipeError(f"{section}.files must all be of one type: {ENDINGS}.")
    if data.queries is not None and data.collection is None:
        raise RecipeError(f"{section}.collection is missing; {section}.queries needs it.")
    for package in data.packages or []:
        try:
            package_directory(package)
        except ModuleNotFoundError as error:
            raise RecipeError(f"{section}.packages: {error}") from None
    if len(set(data.columns or ())) < len(data.columns or ()):
        raise RecipeError(f"{section}.columns must name each column once, got {', '.join(data.columns)}.")
    if section == "mining.corpus":
        if data.columns is not None and len(data.columns) != 1:
            raise RecipeError(f"{section}.columns must name one column, got {', '.join(data.columns)}.")
    elif data.columns is not None and len(data.columns) < 2:
        raise RecipeError(f"{section}.columns must name the query column and at least one document column.")
