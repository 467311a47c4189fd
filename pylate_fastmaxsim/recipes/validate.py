"""Check a recipe as a whole: keys that depend on each other, and files and packages on this machine."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from pylate_fastmaxsim.recipes.config.schema import (
    FIRST_STAGE_KEYS,
    POOLING_KEYS,
    SOURCE_KEYS,
    DataSection,
    EvaluationSection,
    FirstStageSection,
    MiningSection,
    Recipe,
)
from pylate_fastmaxsim.recipes.data.docstrings import package_directory
from pylate_fastmaxsim.recipes.errors import RecipeError
from pylate_fastmaxsim.recipes.files import ENDINGS, file_type


def check(recipe: Recipe) -> None:
    """Raise RecipeError if keys contradict each other, or if a file or package is missing."""
    _check_name(recipe.name)
    _check_model(recipe)
    if recipe.model.visual:
        _check_pages(recipe)
    if recipe.model.kind == "splade":
        _check_splade(recipe)
    if recipe.loss.objective == "margin_mse":
        _check_margins(recipe)
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
    for option in dataclasses.fields(recipe.loss):
        only = option.metadata.get("only")
        if only and recipe.loss.name not in only and getattr(recipe.loss, option.name) is not None:
            raise RecipeError(
                f"loss.{option.name} does not apply to the {recipe.loss.name} loss, but to {' and '.join(only)}."
            )
    for option in ("temperature", "tau"):
        if getattr(recipe.loss, option, None) == 0:
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


def _check_pages(recipe: Recipe) -> None:
    kind, data = recipe.model.kind, recipe.data
    if data.source not in ("hub", "files"):
        raise RecipeError(f"data.source must be hub or files with model.kind {kind}, got {data.source!r}.")
    for name, given in {"collection": data.collection is not None, "streaming": data.streaming}.items():
        if given:
            raise RecipeError(f"data.{name} does not apply to model.kind {kind}.")


def _check_splade(recipe: Recipe) -> None:
    if recipe.training.query_learning_rate is not None and not recipe.model.inference_free:
        raise RecipeError("training.query_learning_rate applies to model.inference_free only.")
    regularizers = recipe.loss.regularizers
    if regularizers is None:
        raise RecipeError("loss.regularizers is missing; model.kind splade needs the weights of its regularizers.")
    if regularizers.warmup_ratio == 0:
        raise RecipeError("loss.regularizers.warmup_ratio must be greater than 0, got 0.0.")
    for side in ("query", "document"):
        if getattr(regularizers, f"{side}_threshold") is not None and getattr(regularizers, side) != "flops":
            raise RecipeError(f"loss.regularizers.{side}_threshold applies to the regularizer flops only.")


def _check_margins(recipe: Recipe) -> None:
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
