"""Problems of a recipe as a whole: keys that contradict each other, missing files and packages, a sentence each."""

from collections.abc import Iterator
from dataclasses import replace
from itertools import chain
from pathlib import Path

from pylate_fastmaxsim.recipes.config.kinds import POSITIONS
from pylate_fastmaxsim.recipes.config.schema import (
    POOLING_KEYS,
    DataSection,
    EvaluationSection,
    ModelSection,
    Recipe,
    RowsSection,
)
from pylate_fastmaxsim.recipes.data.docstrings import package_directory
from pylate_fastmaxsim.recipes.errors import RecipeError
from pylate_fastmaxsim.recipes.files import ENDINGS, file_type

NANO_BEIR_SETS = (
    *("climatefever", "dbpedia", "fever", "fiqa2018", "hotpotqa", "msmarco", "nfcorpus", "nq", "quoraretrieval"),
    *("scidocs", "arguana", "scifact", "touche2020"),
)


def check(recipe: Recipe) -> None:
    """Raise RecipeError if keys contradict each other, or if a file or package is missing."""
    further = {f"data.more[{place}]": section for place, section in enumerate(recipe.data.more or ())}
    further["evaluation.data"] = recipe.evaluation.data
    rows = {"data": recipe.data, **further}
    if recipe.mining is not None:
        rows |= {"mining.pairs": recipe.mining.pairs, "mining.corpus": recipe.mining.corpus}
    parts = [
        _problems_of_model(recipe.model),
        *(_problems_of_rows(data, section) for section, data in rows.items()),
        *(_problems_of_further(recipe, data, section) for section, data in further.items()),
        _problems_of_data(recipe),
        _problems_of_loss(recipe),
        _problems_of_pooling(recipe),
        _problems_of_evaluation(recipe.evaluation),
        _problems_of_best(recipe),
        _problems_of_run(recipe),
    ]
    for sentence in chain.from_iterable(parts):
        raise RecipeError(sentence)


def _problems_of_model(model: ModelSection) -> Iterator[str]:
    if sum(way is not None for way in (model.name_or_path, model.build, model.token_table)) != 1:
        yield "model must have exactly one of name_or_path, build and token_table."
    for key, path in {"name_or_path": model.name_or_path, "token_table": model.token_table}.items():
        if path is not None and path.startswith(("/", ".", "~")) and not Path(path).is_dir():
            yield f"model.{key} must be a model on the Hub or a directory, but {path} is not there."
    if model.build is not None and model.build.hidden_size % (2 * model.build.num_attention_heads):
        yield (
            "model.build.hidden_size must be a multiple of 2 * num_attention_heads, "
            f"got {model.build.hidden_size} and {model.build.num_attention_heads}."
        )
    if model.build is not None and (length := getattr(model, "query_length", None) or 0) > POSITIONS:
        yield (
            f"model.query_length must be at most {POSITIONS}, as many positions as ModernBertModel has, got {length}."
        )


def _problems_of_rows(data: RowsSection | None, section: str) -> Iterator[str]:
    if data is None:
        return
    for name in ("files", "queries", "collection"):
        given = getattr(data, name) or []
        for file in [given] if isinstance(given, str) else given:
            if file_type(file) is None:
                yield f"{section}.{name} must end in {ENDINGS}, got {file}."
            if not Path(file).is_file():
                yield f"{section}.{name}: {file} is not a file."
    if len({file_type(file).removesuffix(".gz") for file in data.files or []}) > 1:
        yield f"{section}.files must all be of one type: {ENDINGS}."
    if data.queries is not None and data.collection is None:
        yield f"{section}.collection is missing; {section}.queries needs it."
    for package in data.packages or []:
        try:
            package_directory(package)
        except ModuleNotFoundError as error:
            yield f"{section}.packages: {error}"
    columns = data.columns or []
    if len(set(columns)) < len(columns):
        yield f"{section}.columns must name each column once, got {', '.join(columns)}."
    if section == "mining.corpus" and len(columns) > 1:
        yield f"{section}.columns must name one column, got {', '.join(columns)}."
    if section != "mining.corpus" and len(columns) == 1:
        yield f"{section}.columns must name the query column and at least one document column."


def _problems_of_data(recipe: Recipe) -> Iterator[str]:
    data, loss, kind = recipe.data, recipe.loss.name, recipe.model.kind
    if recipe.model.visual and data.source not in ("hub", "files"):
        yield f"data.source must be hub or files with model.kind {kind}, got {data.source!r}."
    for key, given in {"collection": data.collection is not None, "streaming": data.streaming}.items():
        if recipe.model.visual and given:
            yield f"data.{key} does not apply to model.kind {kind}."
    if data.source == "docstrings" and loss == "distillation":
        yield "loss.name must be contrastive or cached_contrastive with data.source docstrings."
    if data.source == "distillation" and loss != "distillation":
        yield f"loss.name must be distillation with data.source distillation, got {loss!r}."
    contrastive = loss in ("contrastive", "cached_contrastive")
    for key, applies in {
        "negatives_per_query": contrastive,
        "negatives": contrastive,
        "text_key": contrastive or data.collection is not None,  # distillation has passages in a collection only
        "n_ways": loss == "distillation",
    }.items():
        if getattr(data, key) is not None and not applies:
            yield f"data.{key} does not apply to the {loss} loss."
    if not data.streaming:
        return
    if data.source not in ("hub", "files"):
        yield f"data.source must be hub or files with data.streaming, got {data.source!r}."
    if recipe.training.max_steps is None:
        yield "training.max_steps is missing; with data.streaming it says when training ends."
    if recipe.evaluation.rows:
        yield (
            "evaluation.rows must be 0 with data.streaming, whose rows are read once in passing: evaluate on evaluation.data, "
            "evaluation.beir or evaluation.nano_beir."
        )
    for key, given in {
        "data.max_rows": data.max_rows is not None,
        "data.collection": data.collection is not None,
        "data.more": data.more is not None,
        "model.build": recipe.model.build is not None,
        "training.batch_sampler": recipe.training.batch_sampler != "batch_sampler",
        "training.log_gradient_concentration": recipe.training.log_gradient_concentration is not None,
    }.items():
        if given:
            yield f"{key} does not apply to data.streaming: it needs all rows at once."


def _problems_of_further(recipe: Recipe, data: DataSection | None, section: str) -> Iterator[str]:
    """Of rows beside those of ``data``."""
    if data is None:
        return
    if data.source == "docstrings":
        yield f"{section}.source must be hub, files or distillation, got 'docstrings'."
    for key, given in {"streaming": data.streaming, "more": data.more is not None}.items():
        if given:
            yield f"{section}.{key} does not apply: only data itself has it."
    for sentence in _problems_of_data(replace(recipe, data=data)):
        yield sentence.replace("data.", f"{section}.", 1) if sentence.startswith("data.") else sentence


def _problems_of_best(recipe: Recipe) -> Iterator[str]:
    training, evaluation = recipe.training, recipe.evaluation
    evaluates = training.arguments.get("eval_strategy", "no") != "no"
    needing = training.needs_best
    for key in needing if not evaluates else ():
        yield f"training.eval_strategy must be steps or epoch with training.{key}, which needs evaluations in the training."
    saves = training.arguments.get("save_strategy", "no" if training.save_steps is None else "steps")
    best, when = (training.arguments.get(key) for key in ("load_best_model_at_end", "eval_strategy"))
    if best and saves not in (when, "best"):
        yield f"training.save_strategy must be {when} or best with load_best_model_at_end, got {saves}."
    if (evaluates or training.arguments.get("eval_on_start")) and not (
        evaluation.has_rows or evaluation.beir or evaluation.nano_beir
    ):
        yield "evaluation.rows, data, beir or nano_beir is missing; training.eval_strategy needs something to evaluate on."
    if needing and training.save_total_limit == 1:
        yield f"training.save_total_limit must be at least 2 with {needing[0]}: the best checkpoint and the last."
    pushed = [name for name in training.arguments if name.startswith("hub_")]
    if pushed and not training.arguments.get("push_to_hub"):
        yield f"training.push_to_hub must be true with training.{pushed[0]}."


def _problems_of_loss(recipe: Recipe) -> Iterator[str]:
    loss = recipe.loss
    if loss.objective == "margin_mse" and loss.temperature is not None:
        yield "loss.temperature does not apply to loss.objective margin_mse, which compares scores as they are."
    if loss.objective == "margin_mse" and loss.pooling is not None:
        yield "loss.pooling must be max with loss.objective margin_mse."
    if loss.pool_weights is not None and len(loss.pool_weights) != len(loss.pool_factors or ()):
        yield "loss.pool_weights must be one for each of loss.pool_factors."
    needs_plugin = recipe.model.kind == "colbert" and loss.name != "cached_contrastive"
    if loss.pool_factors is not None and needs_plugin and not recipe.fast.enabled:
        yield f"fast.enabled must be true with loss.pool_factors: PyLate's own {loss.name} loss makes all means unit vectors."
    if recipe.model.kind != "splade":
        return
    if recipe.training.query_learning_rate is not None and not recipe.model.inference_free:
        yield "training.query_learning_rate applies to model.inference_free only."
    if loss.regularizers is None:
        yield "loss.regularizers is missing; model.kind splade needs the weights of its regularizers."
    for side in ("query", "document"):
        if getattr(loss.regularizers, f"{side}_threshold") is not None and getattr(loss.regularizers, side) != "flops":
            yield f"loss.regularizers.{side}_threshold applies to the regularizer flops only."


def _problems_of_pooling(recipe: Recipe) -> Iterator[str]:
    pooling = recipe.loss.pooling
    if pooling is None:
        return
    given = [name for name in POOLING_KEYS if getattr(pooling, name) is not None]
    if len(given) != 1:
        yield (
            f"loss.pooling must have exactly one of {', '.join(POOLING_KEYS)}, got {' and '.join(given) or 'none'}; replace "
            "it as a whole with --set loss.pooling={top_k: 4}, for example."
        )
    if (pooling.start is None) != (pooling.schedule is None):
        missing = "start" if pooling.start is None else "schedule"
        yield (
            f"loss.pooling.{missing} is missing; a schedule has a start, the value in the first step, and a schedule, linear "
            "or cosine."
        )
    if pooling.top_k is not None and pooling.start is not None and not pooling.start.is_integer():
        yield f"loss.pooling.start must be an integer with top_k, got {pooling.start}."
    if recipe.fast.stock_masking:
        yield "fast.stock_masking must be false with loss.pooling: masked tokens are left out of every pooling but the maximum."


def _problems_of_evaluation(evaluation: EvaluationSection) -> Iterator[str]:
    given = [evaluation.data, evaluation.beir, evaluation.nano_beir]
    if (evaluation.rows > 0) + sum(each is not None for each in given) > 1:
        yield "evaluation must have at most one of rows, data, beir and nano_beir."
    if evaluation.corpus_format is not None and evaluation.beir is None:
        yield "evaluation.corpus_format applies to evaluation.beir, which is missing."
    sets = evaluation.nano_beir or []
    for name in sets:  # in upper or lower case, as for the libraries
        if name.lower() not in NANO_BEIR_SETS:
            yield f"evaluation.nano_beir must name sets out of {', '.join(NANO_BEIR_SETS)}, got {name!r}."
    if len({name.lower() for name in sets}) < len(sets):
        yield f"evaluation.nano_beir must name each set once, got {', '.join(sets)}."


def _problems_of_run(recipe: Recipe) -> Iterator[str]:
    mining = recipe.mining
    if mining is not None and mining.range_min + mining.num_negatives > mining.range_max:
        yield (
            "mining.range_max must be at least range_min + num_negatives, "
            f"got {mining.range_max}, {mining.range_min} and {mining.num_negatives}."
        )
    if Path(recipe.name).is_absolute() or ".." in Path(recipe.name).parts:
        yield f"name must be a name, not a path out of the folder of an index, got {recipe.name!r}."
    if recipe.training.max_steps is None and recipe.training.num_train_epochs == 0:
        yield "training.num_train_epochs must be greater than 0 where training.max_steps is not given."
    output = Path(recipe.output_dir)
    there = next(path for path in (output, *output.absolute().parents) if path.exists())
    if not there.is_dir():
        yield f"output_dir must be a directory or a path yet to be made, but {there} is a file."
