"""Find the kind of a model, and load it: of a section, of a checkpoint of its training, or of what has saved it."""

from __future__ import annotations

import json
import os
import zipfile
from contextlib import suppress
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import sentence_transformers
import torch
from huggingface_hub import hf_hub_download, try_to_load_from_cache
from huggingface_hub.errors import EntryNotFoundError, LocalEntryNotFoundError
from safetensors import SafetensorError, safe_open
from sentence_transformers import SentenceTransformer, SparseEncoder
from torch import nn
from transformers import AutoConfig, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase, set_seed

from pylate_fastmaxsim._install import install_command
from pylate_fastmaxsim.integrations.log import log_once
from pylate_fastmaxsim.recipes.config.kinds import ColBERTSection
from pylate_fastmaxsim.recipes.config.schema import ModelSection
from pylate_fastmaxsim.recipes.errors import RecipeError, as_recipe_error, first_line
from pylate_fastmaxsim.recipes.kind import Kind
from pylate_fastmaxsim.recipes.models.retriever import PageModel, retriever_of
from pylate_fastmaxsim.retrieval.static.files import DESCRIPTION_FILE as STATIC_FILE
from pylate_fastmaxsim.retrieval.static.model import StaticLateInteraction

if TYPE_CHECKING:
    from model2vec import StaticModel
    from pylate.models import ColBERT
    from sentence_transformers import MultiVectorEncoder

# A model that recipes train. As text, because not every library is installed.
HostModel: TypeAlias = "ColBERT | MultiVectorEncoder | SparseEncoder | PageModel"
MODULES = {
    "colbert": "colbert",
    "multi_vector": "multi_vector",
    "splade": "splade",
    "colpali": "pages",
    "colqwen2": "pages",
}
# The library that a kind needs, and the extras that bring it.
NEEDED = {"colbert": ("PyLate", "pylate"), "pages": ("colpali-engine", "colpali")}
CONFIG_FILE = "config_sentence_transformers.json"
# By the class that saved a model, the kind of recipe that trains it.
KIND_OF_CLASS = {"ColBERT": "colbert", "SparseEncoder": "splade", "MultiVectorEncoder": "multi_vector"}
# The others that retrieve. A StaticModel is model2vec's.
DENSE_CLASSES = ("SentenceTransformer", "StaticModel")
RETRIEVING_CLASSES = (*KIND_OF_CLASS, *DENSE_CLASSES, "StaticLateInteraction")
NO_TOKENIZER = "{} {} has no tokenizer that can be loaded; it must be saved beside the model."
MODEL_FILES = (".json", ".safetensors", ".bin", ".model", ".txt")


def kind_of(model: ModelSection) -> Kind:
    """The kind of a model."""
    module = MODULES[model.kind]
    if module == "multi_vector" and not hasattr(sentence_transformers, "MultiVectorEncoder"):
        raise RecipeError(
            "model.kind multi_vector needs Sentence Transformers 6, in an environment without PyLate: "
            f"{install_command('multi-vector')} (installed is {sentence_transformers.__version__})."
        )
    try:
        return import_module(f"pylate_fastmaxsim.recipes.kinds.{module}").KIND
    except ImportError as error:
        if module not in NEEDED:
            raise
        library, extra = NEEDED[module]
        # Of Sentence Transformers 6, which trains the same models.
        other = ", or write model.kind: multi_vector" * (
            module == "colbert" and hasattr(sentence_transformers, "MultiVectorEncoder")
        )
        raise RecipeError(
            f"model.kind {model.kind} needs {library}: {install_command(extra)}{other} ({error})."
        ) from error


def load_model(
    section: ModelSection,
    device: torch.device | str,
    seed: int,
    key: str = "model.name_or_path",
    checkpoint: Path | None = None,
) -> HostModel:
    """The model of a section; a projection or adapters that its checkpoint lacks are drawn from ``seed``.

    ``key`` is what an error calls it. ``checkpoint`` is one of the training of this section, which is loaded instead.
    """
    kind = kind_of(section)
    loaded = section if checkpoint is None else replace(section, name_or_path=str(checkpoint))
    set_seed(seed)
    try:
        model = kind.load(loaded, device, key, section.name_or_path)
    except RecipeError:
        raise
    except Exception as error:  # each library that reads the files has its own errors
        found = None
        with suppress(Exception):  # of the Hub's client, or of a file that is not JSON
            found = model_type(loaded.name_or_path)
        if KIND_OF_CLASS.get(found, section.kind) != section.kind:
            raise RecipeError(
                f"{key} {loaded.name_or_path} does not fit model.kind {section.kind}: it is a {found}, which model.kind "
                f"{KIND_OF_CLASS[found]} trains."
            ) from error
        raise model_failure(key, loaded.name_or_path, error, section.trust_remote_code) from error
    if not section.visual:
        require_positions(section, model)
    require_tokenizer(retriever_of(model).tokenizer, key, loaded.name_or_path)
    if section.config_kwargs:
        config = encoder_of(model).config
        unknown = [name for name in section.config_kwargs if not hasattr(config, name)]
        if unknown:  # transformers ignores them silently
            what = "model.config_kwargs is left out where %s has no such value: %s."
            log_once(what, type(config).__name__, ", ".join(unknown))
    return model


def load_trained(section: ModelSection, checkpoint: Path, device: torch.device | str) -> HostModel:
    """The model of a section, with the weights of a checkpoint of its training."""
    return load_model(section, device, 0, "output_dir", checkpoint)


def load_retriever(
    name: str, device: torch.device | str, trust_remote_code: bool = False, key: str = "MODEL", dense: bool = False
) -> HostModel | StaticLateInteraction | SentenceTransformer | StaticModel:
    """The model in this folder or of this name on the Hub, as the class that saved it.

    A StaticEmbedding of Sentence Transformers and a StaticModel of model2vec become a StaticLateInteraction, unless
    ``dense``. Beside Sentence Transformers 6 a ColBERT of PyLate is loaded as a MultiVectorEncoder, which scores the same.
    ``key`` is what an error calls the model.
    """
    saved_by, path = saved_class(name, key, dense), Path(name).expanduser()
    if saved_by == "StaticLateInteraction":
        with as_recipe_error(f"{key} {name} cannot be loaded", (ValueError, OSError)):
            return StaticLateInteraction.load(path, device)
    if saved_by == "StaticModel":
        # Its library may be missing, and have errors of its own for files and of the Hub's client.
        with as_recipe_error(f"{key} {name} cannot be loaded with model2vec", (Exception,)):
            from model2vec import StaticModel

            model = StaticModel.from_pretrained(path if path.is_dir() else name)
        return model if dense else StaticLateInteraction.from_model2vec(model, threshold="lowest").to(device)
    section = ColBERTSection(name_or_path=str(path) if path.is_dir() else name, trust_remote_code=trust_remote_code)
    hosts = {"SparseEncoder": SparseEncoder, "SentenceTransformer": SentenceTransformer}
    host = hosts.get(saved_by, getattr(sentence_transformers, "MultiVectorEncoder", None))
    if host is None and saved_by == "ColBERT":
        return load_model(section, device, seed=0, key=key)
    if host is None:
        raise RecipeError(
            f"{key} {name} is a {saved_by}, which needs Sentence Transformers 6, but Sentence Transformers "
            f"{sentence_transformers.__version__} is installed."
        )
    try:
        model = host(section.name_or_path, device=str(device), trust_remote_code=trust_remote_code)
    except Exception as error:  # each library that reads the files has its own errors
        raise model_failure(key, section.name_or_path, error, trust_remote_code) from error
    if host is SparseEncoder:
        require_inner_product(model, key, name)
    if host is SentenceTransformer and not dense and any(isinstance(each, nn.EmbeddingBag) for each in model.modules()):
        with as_recipe_error(f"{key} {name} has no MaxSim; use --dense", (ValueError, TypeError)):
            return StaticLateInteraction.from_static_embedding(model, threshold="lowest")
    if host is SentenceTransformer and model.similarity_fn_name not in ("cosine", "dot"):
        raise RecipeError(
            f"{key} {name} must score by cosine or the inner product (dot), but its similarity is "
            f"{model.similarity_fn_name}."
        )
    return model


def saved_class(name: str, key: str = "MODEL", dense: bool = False) -> str:
    """The class that has saved the model in this folder or of this name on the Hub, one that retrieves."""
    saved_by = class_of(name, key)
    if saved_by not in RETRIEVING_CLASSES:
        found = f"{CONFIG_FILE} says {saved_by}" if saved_by else f"it has no {CONFIG_FILE}"
        raise RecipeError(
            f"{key} {name} must be a ColBERT that PyLate has saved, a model that retrieves and that Sentence Transformers or "
            f"model2vec has saved, or a StaticLateInteraction, but {found}."
        )
    if dense and saved_by not in DENSE_CLASSES:
        raise RecipeError(f"--dense is for a StaticEmbedding or a model of model2vec, but {name} is a {saved_by}.")
    return saved_by


def class_of(name: str, key: str = "MODEL") -> str | None:
    """The class that has saved the model in this folder or of this name on the Hub; None where its files do not say."""
    if is_missing_folder(name):
        raise RecipeError(f"{key}: there is no folder {name}.")
    path = Path(name).expanduser()
    if (path / STATIC_FILE).exists():
        return "StaticLateInteraction"
    name = str(path) if path.is_dir() else name
    try:
        return model_type(name)
    except Exception as error:  # of the Hub's client, or of a file that is not JSON
        raise model_failure(key, name, error) from error


def require_inner_product(model: SparseEncoder, key: str, name: str) -> None:
    """Refuse a model with another similarity, which exact sparse search has not."""
    if model.similarity_fn_name != "dot":
        raise RecipeError(
            f"{key} {name} must score by the inner product (dot), but its similarity is {model.similarity_fn_name}."
        )


def is_missing_folder(name: str) -> bool:
    """True if there is no such folder, and it is no name on the Hub: that has one slash and does not begin with a dot."""
    path = Path(name).expanduser()
    return not path.is_dir() and (path.exists() or path.is_absolute() or name.startswith(".") or name.count("/") > 1)


def model_failure(key: str, name: str, error: Exception, trust_remote_code: bool = False) -> RecipeError:
    """A RecipeError for an error that a library raised while it loaded the model of ``key``."""
    # The libraries call an unreadable file missing, or say that there is no tokenizer.
    files = [path for depth in ("*", "*/*") for path in Path(name).glob(depth) if path.suffix in MODEL_FILES]
    if file := next((path for path in files if not os.access(path, os.R_OK)), None):
        return RecipeError(f"{key} {name} cannot be loaded: {file} cannot be read.")
    # safetensors does not name the file.
    if file := next((path for path in files if path.suffix == ".safetensors" and is_cut_short(path)), None):
        return RecipeError(
            f"{key} {name} cannot be loaded: {file} is not whole, as after a download that was cut short or a clone "
            "without Git LFS."
        )
    if lacks_tokenizer(name, trust_remote_code):
        return RecipeError(NO_TOKENIZER.format(key, name))
    reason = repr(error) if isinstance(error, KeyError) else first_line(error)  # its text is only the key
    return RecipeError(f"{key} {name} cannot be loaded: {reason}")


def is_cut_short(file: Path) -> bool:
    """True if a file of weights, states or JSON cannot be read to its end, as after a power cut."""
    try:
        if file.suffix == ".safetensors":
            with safe_open(file, framework="pt"):
                return False
        if file.suffix == ".json":
            return not isinstance(json.loads(file.read_text(encoding="utf-8")), (dict, list))
    except (OSError, ValueError, SafetensorError):
        return True
    return file.suffix in (".pt", ".pth", ".bin") and not zipfile.is_zipfile(file)


def lacks_tokenizer(name: str, trust_remote_code: bool) -> bool:
    """True if the configuration can be loaded and the tokenizer cannot; transformers has no clear error for that."""
    try:
        AutoConfig.from_pretrained(name, trust_remote_code=trust_remote_code)
    except Exception:
        return False
    try:
        AutoTokenizer.from_pretrained(name, trust_remote_code=trust_remote_code)
    except Exception:
        return True
    return False


def require_tokenizer(tokenizer: PreTrainedTokenizerBase, key: str, name: str) -> None:
    """Refuse a tokenizer with only special tokens: transformers 5 makes up such a one for a model without any."""
    if set(tokenizer.get_vocab()) <= {*tokenizer.all_special_tokens, *tokenizer.get_added_vocab()}:
        raise RecipeError(NO_TOKENIZER.format(key, name))


def model_type(name: str) -> str | None:
    """The class that a model was saved by, or None where its files do not say."""
    config = json_of(name, CONFIG_FILE)
    if config is None:
        # As PyLate tells models of the original ColBERT.
        architectures = (json_of(name, "config.json") or {}).get("architectures") or [""]
        if architectures[0] == "HF_ColBERT":
            return "ColBERT"
        # Which model2vec writes for Sentence Transformers, and which itself also writes the file above.
        first, *_ = json_of(name, "modules.json") or [{}]
        return "StaticModel" if first.get("type", "").endswith("StaticEmbedding") else None
    # Earlier releases of PyLate and of Sentence Transformers did not write it; only PyLate writes lengths.
    return config.get("model_type", "ColBERT" if "document_length" in config else "SentenceTransformer")


def json_of(name: str, file: str) -> Any:
    """The content of a JSON file of a model, or None if it has no such file."""
    try:
        path = Path(name, file) if Path(name).is_dir() else Path(hf_hub_download(name, file))
        return json.loads(path.read_text(encoding="utf-8"))
    except LocalEntryNotFoundError:  # no connection to the Hub, and no copy on disk
        if isinstance(try_to_load_from_cache(name, "config.json"), str):
            return None  # of a model that was downloaded; the libraries take the file as missing too
        raise
    except (FileNotFoundError, EntryNotFoundError):
        return None


def has_projection(name: str) -> bool:
    """Tell whether a checkpoint has a projection, which Sentence Transformers also keeps of a SentenceTransformer."""
    saved = [module["type"].rpartition(".")[2] for module in json_of(name, "modules.json") or []]
    return "Dense" in saved or model_type(name) in ("MultiVectorEncoder", "ColBERT")


def encoder_of(model: nn.Module) -> PreTrainedModel:
    """The model of transformers in a text encoder, also below the route of a Router."""
    return next(module for module in model.modules() if isinstance(module, PreTrainedModel))


def positions(encoder: nn.Module) -> int | None:
    """Number of tokens of a text that an encoder was made for; None if it does not say."""
    return min(learned_positions(encoder), default=getattr(encoder.config, "max_position_embeddings", None))


def learned_positions(encoder: nn.Module) -> list[int]:
    """Number of tokens of a text in each table of learned positions."""
    # In RoBERTa the positions of a text begin after that of padding.
    return [
        table.num_embeddings - (0 if table.padding_idx is None else table.padding_idx + 1)
        for name, table in encoder.named_modules()
        if name.endswith("position_embeddings") and isinstance(table, nn.Embedding)
    ]


def require_positions(section: ModelSection, model: nn.Module) -> None:
    """Refuse lengths beyond the encoder's positions.

    Learned positions limit queries and documents. Rotary positions limit only queries, which are padded to their
    length: documents longer than the encoder was trained for are common.
    """
    encoder = encoder_of(model)
    learned = min(learned_positions(encoder), default=None)
    limits = {"query_length": positions(encoder), "document_length": learned, "max_seq_length": learned}
    for key, limit in limits.items():
        length = getattr(section, key, None)
        if length is not None and limit is not None and length > limit:
            raise RecipeError(
                f"model.{key} must be at most {limit}, as many positions as {type(encoder).__name__} has, got {length}."
            )
