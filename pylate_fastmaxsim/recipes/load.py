"""Read a recipe: YAML and ``key=value`` overrides to a checked :class:`Recipe`."""

from __future__ import annotations

import dataclasses
import difflib
import json
import math
import os
import types
import typing
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal

import yaml

from pylate_fastmaxsim.recipes.docstrings import package_directory
from pylate_fastmaxsim.recipes.schema import (
    DataSection,
    EvaluationSection,
    FastSection,
    MiningSection,
    ModelSection,
    Recipe,
    RecipeError,
)

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
LOSSES_WITH_NEGATIVES = ("colbert_negative_ce", "colbert_pairwise_negative_ce")
VISUAL_LOSSES = ("colbert", "colbert_pairwise_ce", "colbert_sigmoid", *LOSSES_WITH_NEGATIVES)
VISUAL_MODEL_KEYS = ("kind", "name_or_path", "dtype", "attn_implementation", "max_visual_tokens", "lora")
VISUAL_FAST_KEYS = ("enabled", "grad_filter")
LOSS_OPTIONS = {
    "contrastive": {"temperature", "size_average", "score_mini_batch_size", "gather_across_devices"},
    "cached_contrastive": {
        "temperature",
        "size_average",
        "mini_batch_size",
        "score_mini_batch_size",
        "gather_across_devices",
    },
    "distillation": {"size_average", "normalize_scores"},
    **dict.fromkeys(VISUAL_LOSSES, VISUAL_LOSS_OPTIONS),
    **{name: VISUAL_LOSS_OPTIONS | {"in_batch_term_weight"} for name in LOSSES_WITH_NEGATIVES},
}
# The first of each must be given.
SOURCE_KEYS = {
    "docstrings": ("packages",),
    "hub": ("name", "config", "split"),
    "files": ("files",),
    "distillation": ("name", "split", "n_ways"),
}
FILE_TYPES = {".jsonl": "json", ".parquet": "parquet"}

_TYPE_NAMES = {
    bool: "true or false",
    int: "an integer",
    float: "a number",
    str: "a string",
    list[str]: "a list of at least one string",
    dict[str, Any]: "a mapping",
}

# The smallest and the largest value of a key.
Limits = tuple[float | None, float | None]
NO_LIMITS: Limits = (None, None)


def load_recipe(path: str | Path, overrides: Sequence[str] = ()) -> Recipe:
    """Read and check a recipe. Nothing is written or downloaded.

    Parameters
    ----------
    path
        YAML file with the sections of :class:`Recipe`. Its stem is the default of ``name``.
    overrides
        ``a.b=value`` items, the value in YAML, applied in order before anything is checked.

    Raises
    ------
    RecipeError
        With one sentence that names the key and what is allowed.

    Examples
    --------
    >>> import tempfile, pathlib
    >>> from pylate_fastmaxsim.recipes.load import load_recipe
    >>> text = "{output_dir: runs/a, model: {name_or_path: some/model}, data: {source: hub, name: some/data}}"
    >>> with tempfile.TemporaryDirectory() as directory:
    ...     path = pathlib.Path(directory, "a.yaml")
    ...     _ = path.write_text(text)
    ...     load_recipe(path, ["training.learning_rate=3e-6"]).training.learning_rate
    3e-06
    """
    path = Path(path)
    values = _read_yaml(path)
    for override in overrides:
        _apply_override(values, override)
    values.setdefault("name", path.stem)
    recipe = _build(Recipe, values, "")
    _check(recipe)
    return recipe


def with_defaults(values: dict[str, Any], section: type) -> dict[str, Any]:
    """What ``asdict`` of a section gave in an earlier version, with the defaults of keys that it did not have yet.

    Examples
    --------
    >>> from pylate_fastmaxsim.recipes.load import with_defaults
    >>> from pylate_fastmaxsim.recipes.schema import FastSection
    >>> with_defaults({"enabled": False, "ring": True}, FastSection)["padding_free"]
    True
    """
    hints = typing.get_type_hints(section)
    filled = dict(values)
    for field in dataclasses.fields(section):
        if field.name not in values:
            made = field.default if field.default_factory is dataclasses.MISSING else field.default_factory()
            if made is not dataclasses.MISSING:
                filled[field.name] = dataclasses.asdict(made) if dataclasses.is_dataclass(made) else made
            continue
        kinds = [kind for kind in (hints[field.name], *typing.get_args(hints[field.name])) if _is_section(kind)]
        if kinds and isinstance(values[field.name], dict):
            filled[field.name] = with_defaults(values[field.name], kinds[0])
    return filled


def _is_section(kind: Any) -> bool:
    return isinstance(kind, type) and dataclasses.is_dataclass(kind)


def dump_recipe(recipe: Recipe) -> str:
    """The recipe as YAML that :func:`load_recipe` reads back to the same recipe."""
    return yaml.safe_dump(dataclasses.asdict(recipe), sort_keys=False, allow_unicode=True)


class _UniqueKeyLoader(yaml.SafeLoader):
    """SafeLoader that refuses a key given twice, where YAML would silently keep the last, and what contains itself."""

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node:
        node = super().compose_node(parent, index)
        # Until all of a node is read it has no end, and until then only an alias inside of it can give it.
        if node.end_mark is None:
            line = node.start_mark.line + 1
            raise RecipeError(f"an alias names what it stands in (line {line}); name something that ends before it.")
        return node

    def compose_mapping_node(self, anchor: str | None) -> yaml.MappingNode:
        # Where a mapping is read and not where it is built: by then `<<` may have brought in keys of another.
        node = super().compose_mapping_node(anchor)
        seen = set()
        for key_node, _ in node.value:
            merges = key_node.tag == "tag:yaml.org,2002:merge"
            key = key_node.value if merges else self.construct_object(key_node, deep=True)
            if not isinstance(key, typing.Hashable):
                continue  # which SafeLoader refuses
            if key in seen:
                raise RecipeError(f"{key!r} is given twice (line {key_node.start_mark.line + 1}); give it once.")
            seen.add(key)
        return node

    def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:
        if isinstance(node, yaml.ScalarNode) and not _is_text(node.value):
            problem = f"{node.value!r} has half of a character"
            raise yaml.constructor.ConstructorError(None, None, problem, node.start_mark)
        try:
            return super().construct_object(node, deep)
        except (RecipeError, yaml.YAMLError):
            raise
        except (ValueError, LookupError, AttributeError, OverflowError):  # as 2024-31-12, 0x_ and !!bool maybe
            kind = node.tag.rpartition(":")[2]
            problem = f"{node.value!r} is written like a value of the type {kind} but is none; quote it if it is text"
            raise yaml.constructor.ConstructorError(None, None, problem, node.start_mark) from None


def _is_text(value: str) -> bool:
    """Whether a string can be written to a file; YAML can name half of a character, as \\ud800."""
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True


def _parse_yaml(text: str, where: str) -> Any:
    try:
        return yaml.load(text, _UniqueKeyLoader)
    except RecipeError as error:
        raise RecipeError(f"{where}: {error}") from None
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        line = f", line {mark.line + 1}" if mark else ""
        problem = getattr(error, "problem", None) or "it cannot be read"
        raise RecipeError(f"{where}{line}: not valid YAML: {problem}.") from None
    except RecursionError:
        raise RecipeError(f"{where}: its sections are nested deeper than can be read.") from None


def _read_yaml(path: Path) -> dict[str, Any]:
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise RecipeError(f"Cannot read the recipe {path}: {reason}.") from None
    values = _parse_yaml(text, str(path))
    if not isinstance(values, dict):
        sections = ", ".join(field.name for field in dataclasses.fields(Recipe))
        raise RecipeError(f"{path}: a recipe is a mapping with the keys {sections}.")
    return values


def _apply_override(values: dict[str, Any], override: str) -> None:
    dotted, equals, text = override.partition("=")
    *sections, last = dotted.strip().split(".")
    if not equals or not all([*sections, last]):
        raise RecipeError(f"--set {override}: write it as key=value, for example training.max_steps=100.")
    for section in sections:
        if values.get(section) is None:
            values[section] = {}
        if not isinstance(values[section], dict):
            raise RecipeError(f"--set {override}: {section} is not a section.")
        # A copy, since an alias of YAML makes two sections one object.
        values[section] = dict(values[section])
        values = values[section]
    values[last] = _parse_yaml(text, f"--set {dotted}")


def _build(section: type, values: Any, path: str) -> Any:
    """An instance of a schema dataclass from parsed YAML."""
    if not isinstance(values, dict):
        names = ", ".join(field.name for field in dataclasses.fields(section))
        raise RecipeError(f"{path} must be a section with the keys {names}, got {values!r}.")
    hints = typing.get_type_hints(section)
    fields = {field.name: field for field in dataclasses.fields(section)}
    for name in values:
        if name not in fields:
            raise RecipeError(_unknown_key(name, path, list(fields)))
    arguments = {}
    for name, field in fields.items():
        dotted = f"{path}.{name}" if path else name
        if name in values:
            limits = field.metadata.get("minimum"), field.metadata.get("maximum")
            value = _convert(values[name], hints[name], limits, dotted)
            arguments[name] = _reachable(_at_home(value), dotted) if field.metadata.get("path") else value
        elif field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING:
            raise RecipeError(f"{dotted} is missing; it must be {_allowed(hints[name], NO_LIMITS)}.")
    return section(**arguments)


def _at_home(paths: str | list[str] | None) -> str | list[str] | None:
    """The same with the home directory for a leading ``~``, which no shell sees in a file."""
    if isinstance(paths, list):
        return [os.path.expanduser(path) for path in paths]
    return paths if paths is None else os.path.expanduser(paths)


def _reachable(paths: str | list[str] | None, key: str) -> str | list[str] | None:
    """The same, once the system has looked each up: it refuses names that are too long and folders not to be entered.

    Nothing need be there: it may be a name on the Hub, or yet to be made.
    """
    for path in [paths] if isinstance(paths, str) else paths or ():
        if not path:
            raise RecipeError(f"{key} must not be empty.")
        if "::" in path:
            raise RecipeError(f"{key} must not have :: in it, by which datasets joins file systems, got {path}.")
        try:
            os.stat(os.path.join(path, "."))  # the dot, to enter it if it is a folder
        except (FileNotFoundError, NotADirectoryError):
            continue
        except OSError as error:
            raise RecipeError(f"{key}: {path} cannot be reached: {os.strerror(error.errno)}.") from None
        except ValueError:  # a null byte
            raise RecipeError(f"{key} has a character that no path may have, got {path!r}.") from None
    return paths


def _unknown_key(name: Any, path: str, known: list[str]) -> str:
    dotted = f"{path}.{name}" if path else name
    close = difflib.get_close_matches(str(name), known, n=1)
    hint = f"did you mean {close[0]!r}?" if close else f"allowed here: {', '.join(known)}."
    return f"{dotted} is not a key of a recipe; {hint}"


def _convert(value: Any, hint: Any, limits: Limits, path: str) -> Any:
    """``value`` if it is of the type that ``hint`` allows; YAML's ``1e-5``, a string, becomes a float."""
    options = typing.get_args(hint) if typing.get_origin(hint) in (typing.Union, types.UnionType) else (hint,)
    if value is None and type(None) in options:
        return None
    (kind,) = [option for option in options if option is not type(None)]
    if dataclasses.is_dataclass(kind):
        return _build(kind, value, path)
    if kind is float and isinstance(value, (int, str)) and not isinstance(value, bool):
        with suppress(ValueError, OverflowError):
            value = float(value)
    if not _is_a(value, kind) or not _is_within(value, limits):
        raise RecipeError(f"{path} must be {_allowed(hint, limits)}, got {value!r}.")
    return value


def _is_within(value: Any, limits: Limits) -> bool:
    minimum, maximum = limits
    return (minimum is None or value >= minimum) and (maximum is None or value <= maximum)


def _is_a(value: Any, kind: Any) -> bool:
    if typing.get_origin(kind) is Literal:
        return value in typing.get_args(kind)
    if kind == list[str]:
        return isinstance(value, list) and bool(value) and all(isinstance(item, str) for item in value)
    if kind == dict[str, Any]:
        return isinstance(value, dict) and all(isinstance(item, str) for item in value)
    if kind is float:
        return isinstance(value, float) and math.isfinite(value)
    return isinstance(value, kind) and (kind is bool or not isinstance(value, bool))


def _allowed(hint: Any, limits: Limits) -> str:
    minimum, maximum = limits
    options = typing.get_args(hint) if typing.get_origin(hint) in (typing.Union, types.UnionType) else (hint,)
    names = []
    for option in options:
        if option is type(None):
            names.append("null")
        elif typing.get_origin(option) is Literal:
            names.append("one of " + ", ".join(typing.get_args(option)))
        elif dataclasses.is_dataclass(option):
            names.append("a section with the keys " + ", ".join(field.name for field in dataclasses.fields(option)))
        else:
            bounds = f" of at least {minimum}" if minimum is not None else ""
            bounds += f" and at most {maximum}" if maximum is not None else ""
            names.append(_TYPE_NAMES[option] + bounds)
    return " or ".join(names)


def _check(recipe: Recipe) -> None:
    """Everything that concerns more than one key, or what is on this machine."""
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
    for option in dataclasses.fields(recipe.loss):
        if option.name == "name" or getattr(recipe.loss, option.name) is None:
            continue
        if option.name not in LOSS_OPTIONS[recipe.loss.name]:
            allowed = ", ".join(sorted(LOSS_OPTIONS[recipe.loss.name]))
            raise RecipeError(
                f"loss.{option.name} does not apply to the {recipe.loss.name} loss, which takes {allowed}."
            )
    for option in ("temperature", "tau"):
        if getattr(recipe.loss, option) == 0:
            raise RecipeError(f"loss.{option} must be greater than 0, got 0.0.")
    if recipe.training.max_steps is None and recipe.training.num_train_epochs == 0:
        raise RecipeError("training.num_train_epochs must be greater than 0 where training.max_steps is not given.")
    _check_evaluation(recipe.evaluation)
    output = Path(recipe.output_dir)
    there = next(path for path in (output, *output.absolute().parents) if path.exists())
    if not there.is_dir():
        raise RecipeError(f"output_dir must be a directory or a path yet to be made, but {there} is a file.")


def _check_model(recipe: Recipe) -> None:
    model = recipe.model
    if (model.name_or_path is None) == (model.build is None):
        raise RecipeError("model must have exactly one of name_or_path and build.")
    if model.name_or_path is not None:
        path = model.name_or_path
        if path.startswith(("/", ".", "~")) and not Path(path).is_dir():
            raise RecipeError(f"model.name_or_path must be a model on the Hub or a directory, but {path} is not there.")
    try:
        json.dumps(model.config_kwargs, allow_nan=False)
    except (TypeError, ValueError):
        raise RecipeError(
            "model.config_kwargs must hold what the JSON of a model's configuration can: strings, finite numbers, true, "
            f"false, null, lists and mappings, got {model.config_kwargs!r}."
        ) from None
    if model.build is not None and model.build.hidden_size % (2 * model.build.num_attention_heads):
        raise RecipeError(
            "model.build.hidden_size must be a multiple of 2 * num_attention_heads, "
            f"got {model.build.hidden_size} and {model.build.num_attention_heads}."
        )


def _check_kind(recipe: Recipe) -> None:
    """What only text encoders or only models of pages have."""
    model = recipe.model
    for field in dataclasses.fields(model):
        visual_only = field.name in VISUAL_MODEL_KEYS and field.name not in ("kind", "name_or_path")
        applies = field.name in VISUAL_MODEL_KEYS if model.visual else not visual_only
        if not applies and getattr(model, field.name) != getattr(ModelSection(), field.name):
            raise RecipeError(f"model.{field.name} does not apply to model.kind {model.kind}.")
    if model.visual != (recipe.loss.name in VISUAL_LOSSES):
        allowed = VISUAL_LOSSES if model.visual else [name for name in LOSS_OPTIONS if name not in VISUAL_LOSSES]
        raise RecipeError(
            f"loss.name must be one of {', '.join(allowed)} with model.kind {model.kind}, got {recipe.loss.name!r}."
        )
    if model.visual:
        _check_visual(recipe)


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
        **{
            f"fast.{field.name}": getattr(recipe.fast, field.name) != field.default
            for field in dataclasses.fields(FastSection)
            if field.name not in VISUAL_FAST_KEYS
        },
    }.items():
        if given:
            raise RecipeError(f"{key} does not apply to model.kind {kind}.")


def _check_evaluation(evaluation: EvaluationSection) -> None:
    if (evaluation.rows > 0) + (evaluation.beir is not None) + (evaluation.nano_beir is not None) > 1:
        raise RecipeError("evaluation must have at most one of rows, beir and nano_beir.")
    if evaluation.nano_beir is not None:
        # Imported where it is used: it brings all of PyLate, which other recipes need only later.
        from pylate_fastmaxsim.recipes.nano_beir import check_names

        check_names(evaluation.nano_beir)


def _check_mining(mining: MiningSection) -> None:
    for section, data in {"mining.pairs": mining.pairs, "mining.corpus": mining.corpus}.items():
        if data is not None and data.source not in ("hub", "files"):
            raise RecipeError(f"{section}.source must be hub or files, got {data.source!r}.")
    if mining.range_min + mining.num_negatives > mining.range_max:
        raise RecipeError(
            "mining.range_max must be at least range_min + num_negatives, "
            f"got {mining.range_max}, {mining.range_min} and {mining.num_negatives}."
        )


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
    for file in data.files or []:
        if Path(file).suffix not in FILE_TYPES:
            raise RecipeError(f"{section}.files must end in {' or '.join(FILE_TYPES)}, got {file}.")
        if not Path(file).is_file():
            raise RecipeError(f"{section}.files: {file} is not a file.")
        try:
            with open(file, "rb"):
                pass
        except OSError as error:
            raise RecipeError(f"{section}.files: {file} cannot be read: {os.strerror(error.errno)}.") from None
    if len({Path(file).suffix for file in data.files or []}) > 1:
        raise RecipeError(f"{section}.files must all be of one type, .jsonl or .parquet.")
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
