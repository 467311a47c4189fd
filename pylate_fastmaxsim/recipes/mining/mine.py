"""Distillation data from (query, positive) pairs: hard negatives by exact search, scored by a teacher."""

import functools
import json
import os
import shutil
from contextlib import nullcontext, suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
import yaml
from accelerate import PartialState
from accelerate.utils import gather_object
from datasets import Dataset

from pylate_fastmaxsim.files.record import read_record, write_record
from pylate_fastmaxsim.files.replace import remove_file, remove_scratch, replace_file, replace_folder
from pylate_fastmaxsim.recipes.config.schema import Recipe
from pylate_fastmaxsim.recipes.errors import RecipeError, within_memory
from pylate_fastmaxsim.recipes.files import hold_lock, inputs_of, make_directory, require_output
from pylate_fastmaxsim.recipes.mining.first_stage import find_candidates, load_mining_stage
from pylate_fastmaxsim.recipes.mining.negatives import DocumentSearch, hard_negatives
from pylate_fastmaxsim.recipes.mining.pairs import Pairs, load_pairs
from pylate_fastmaxsim.recipes.mining.resumable import Work
from pylate_fastmaxsim.recipes.mining.teacher import Candidates, grade, load_teacher
from pylate_fastmaxsim.recipes.models.load import kind_of, load_model
from pylate_fastmaxsim.recipes.training.arguments import training_arguments
from pylate_fastmaxsim.recipes.training.inputs import prepare

LOCK_ENDING = ".lock"  # of the lock file beside the data
CARD = "README.md"
SUMMARY_FILE = "mining.json"  # written last: data with it are complete
# In the order in which new ones come into place.
OWN_FILES = ("queries.parquet", "documents.parquet", "train.parquet", CARD, SUMMARY_FILE)
# Where the summary of data that are being replaced waits, in the folder of unfinished work.
OLD_SUMMARY = "replaced.json"


def mine(recipe: Recipe, resume: bool = True) -> dict[str, Any]:
    """Write distillation data to ``data.name``, in the layout of ``lightonai/ms-marco-en-bge``.

    Each row holds the positive of a pair and its hardest negatives, best first, with the teacher's scores. Candidates
    are all positives and the documents of ``mining.corpus``. What is computed is kept in ``data.name`` +
    ``.unfinished`` until the data set is complete, so that with ``resume`` an interrupted run goes on from there, also
    with other margins or another teacher. Otherwise mining starts over, and replaces its own files in ``data.name`` when
    the new ones are complete.

    Under a distributed launcher every process calls this and computes a share, in a folder that all must see. Only the
    main process writes the data set. The result does not depend on the number of processes, which may change when a run
    goes on. A process that waits longer than the timeout of ``torch.distributed`` (30 minutes) fails, so no part should
    take that long.

    Returns
    -------
    Numbers of queries, documents, rows written and rows left out for lack of negatives; also in ``mining.json``.
    """
    section = recipe.mining
    if section is None or recipe.data.source != "distillation":
        raise RecipeError("fastmaxsim mine needs a recipe with a mining section and data.source distillation.")
    if recipe.model.build is not None:
        raise RecipeError("model.build does not apply to fastmaxsim mine, which searches with a model that is trained.")
    device = training_arguments(recipe, kind_of(recipe.model)).device
    processes = PartialState()
    output = Path(recipe.data.name)
    if output.is_symlink():  # a folder cannot be renamed to a link
        output = output.resolve()
    for name in OWN_FILES:
        require_output("data.name", output / name, inputs_of(section, recipe.model))
    unfinished = output.with_name(output.name + ".unfinished")
    lock = hold_lock("data.name", output.with_name(output.name + LOCK_ENDING), f"{output} is being mined")
    with lock if processes.is_main_process else nullcontext():
        if processes.is_main_process:
            remove_scratch(output.parent, output.name)
            make_directory("data.name", unfinished)
        advice = "what is done is kept, and the same command with a smaller one goes on from there"
        try:
            with within_memory("mining.batch_size", section.batch_size, advice):
                return _mine(recipe, resume, device, processes, output, unfinished)
        finally:
            if processes.is_main_process:
                with suppress(OSError):
                    unfinished.rmdir()  # if nothing was done


def _mine(
    recipe: Recipe, resume: bool, device: torch.device, processes: PartialState, output: Path, unfinished: Path
) -> dict[str, Any]:
    section = recipe.mining
    processes.wait_for_everyone()  # until the main process has made the folder
    # Machines without a common disk would miss each other's parts.
    if not all(gather_object([unfinished.is_dir()])):
        raise RecipeError(
            f"data.name: {output} must be on a disk that all machines share, but not all processes find {unfinished} there."
        )
    settings = {"mining": asdict(section), "model": asdict(recipe.model), "seed": recipe.training.seed}
    finished = _finished(output, unfinished, settings, resume)
    if finished is not None:
        return finished
    # Errors of the recipe come before hours of search, and before anything is removed.
    with processes.main_process_first():
        pairs = load_pairs(section)
    with processes.main_process_first():
        prepared = prepare(recipe)
    model = load_model(prepared.model, device, recipe.training.seed)
    first_stage = None if section.first_stage is None else load_mining_stage(section, model, pairs, device)
    teacher = load_teacher(section, device, recipe.model.kind)
    if processes.is_main_process and not resume:
        _start_over(output, unfinished)
    work = Work(unfinished, processes, section)
    common = {
        "mining.pairs or mining.corpus": pairs.digest,
        "model": settings["model"],
        "training.seed": settings["seed"],
    }
    candidates = None
    if first_stage is not None:
        candidates = find_candidates(first_stage, pairs, section, work, common, device)
        del first_stage
    search = DocumentSearch(model, pairs, section, work, common)
    best = search.best_documents() if candidates is None else search.best_candidates(candidates)
    chosen = hard_negatives(pairs, section, *best, search.lowest_positive_scores())
    del model, search
    candidates = [(query, [document, *chosen[query]]) for query, document in pairs.rows if query in chosen]
    if not candidates:
        raise RecipeError(
            "mining: no query has as many negatives as mining.num_negatives; lower it or loosen the margins, which keeps "
            "the search, or raise mining.range_max, which searches again."
        )
    graded = grade(teacher, pairs, candidates, section, work)
    # All have read the parts before the main process removes them.
    processes.wait_for_everyone()
    summary = {
        "queries": len(pairs.queries),
        "documents": len(pairs.documents),
        "rows": len(candidates),
        "left_out": len(pairs.rows) - len(candidates),
        "data": str(output),
    }
    if processes.is_main_process:
        write_data(unfinished / "data", pairs, candidates, graded, summary | {"settings": settings})
        put_into_place(unfinished / "data", output, replace=(unfinished / OLD_SUMMARY).exists())
        shutil.rmtree(unfinished)
    processes.wait_for_everyone()
    return summary


def _start_over(output: Path, unfinished: Path) -> None:
    """Remove unfinished work, and mark complete data as to be replaced; until then it can be trained on."""
    for path in unfinished.iterdir():
        if path.is_dir():
            shutil.rmtree(path)
        elif path.name != OLD_SUMMARY:
            path.unlink()
    if (output / SUMMARY_FILE).exists():
        os.replace(output / SUMMARY_FILE, unfinished / OLD_SUMMARY)


def _finished(output: Path, unfinished: Path, settings: dict[str, Any], resume: bool) -> dict[str, Any] | None:
    """The summary of data that are complete, or None if there is work to do."""
    if not output.exists() or not any(output.iterdir()):
        return None
    file = output / SUMMARY_FILE
    if not file.exists():
        if (unfinished / OLD_SUMMARY).exists():  # data that are being replaced
            return None
        raise RecipeError(f"data.name must be a folder for mining to write, but {output} holds something else.")
    if not resume:
        return None
    try:
        earlier = read_record(file)
    except ValueError as error:
        raise RecipeError(f"data.name: {error} Choose another folder, or start over with --no-resume.") from None
    # As JSON, where a tuple is a list.
    if _without_piece_sizes(earlier["settings"]) != _without_piece_sizes(json.loads(json.dumps(settings))):
        raise RecipeError(
            f"data.name: {output} was mined with other settings; keep them, choose another folder, or start over with --no-resume."
        )
    return {key: value for key, value in earlier.items() if key != "settings"}


def _without_piece_sizes(settings: dict[str, Any]) -> dict[str, Any]:
    """Settings without the sizes of batches and parts."""
    pieces = ("batch_size", "documents_per_part", "rows_per_part")
    return settings | {"mining": {key: value for key, value in settings["mining"].items() if key not in pieces}}


def write_data(folder: Path, pairs: Pairs, candidates: Candidates, scores: np.ndarray, summary: dict[str, Any]) -> None:
    """Write rows, texts, card and summary into a new ``folder``."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    train = {
        "query_id": [str(query) for query, _ in candidates],
        "document_ids": [list(map(str, row)) for _, row in candidates],
        "scores": scores.tolist(),
    }
    tables = {
        "train": Dataset.from_dict(train),
        "queries": _numbered(pairs.queries, "query_id", folder),
        "documents": _numbered(pairs.documents, "document_id", folder),
    }
    for name, table in tables.items():
        table.to_parquet(folder / f"{name}.parquet")
    configs = [{"config_name": name, "data_files": [{"split": "train", "path": f"{name}.parquet"}]} for name in tables]
    (folder / CARD).write_text(f"---\n{yaml.safe_dump({'configs': configs})}---\n", encoding="utf-8")
    write_record(folder / SUMMARY_FILE, summary)


def put_into_place(data: Path, output: Path, replace: bool) -> None:
    """Move the folder ``data`` to ``output``; with ``replace`` file by file, which leaves the user's files there."""
    if not replace:
        replace_folder(output, lambda scratch: os.replace(data, scratch))
        return
    output.mkdir(exist_ok=True)
    # Old rows with new texts could be trained on, so the rows go first and come last.
    remove_file(output / "train.parquet")
    if (output / CARD).exists():  # it may be edited, and says where the tables are, which does not change
        (data / CARD).unlink()
    for name in OWN_FILES:
        if (data / name).exists():
            replace_file(output / name, functools.partial(os.replace, data / name))


def _numbered(texts: Dataset, column: str, folder: Path) -> Dataset:
    """``texts`` with their row numbers as ids, on disk."""
    numbered = texts.map(
        lambda batch, rows: {column: list(map(str, rows))},
        batched=True,
        with_indices=True,
        cache_file_name=str(folder.parent / f"{column}.arrow"),
        load_from_cache_file=False,
        desc="Writing texts",
    )
    return numbered.select_columns([column, "text"])
