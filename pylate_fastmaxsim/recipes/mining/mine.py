"""From plain (query, positive) pairs to distillation data: hard negatives by exact search, scored by a teacher."""

from __future__ import annotations

import hashlib
import json
import shutil
from contextlib import nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from accelerate import PartialState
from accelerate.utils import gather_object

from pylate_fastmaxsim.recipes.config.parse import with_defaults
from pylate_fastmaxsim.recipes.config.schema import MiningSection, ModelSection, Recipe
from pylate_fastmaxsim.recipes.data.mined import SUMMARY_FILE, read_summary
from pylate_fastmaxsim.recipes.data.tables import progress_shown
from pylate_fastmaxsim.recipes.errors import RecipeError
from pylate_fastmaxsim.recipes.files.lock import only_command
from pylate_fastmaxsim.recipes.memory import is_out_of_memory
from pylate_fastmaxsim.recipes.mining.dataset import OLD_SUMMARY, put_into_place, write_data
from pylate_fastmaxsim.recipes.mining.negatives import hard_negatives, lowest_positive_scores, search_documents
from pylate_fastmaxsim.recipes.mining.pairs import Pairs, load_pairs
from pylate_fastmaxsim.recipes.mining.resumable import Work
from pylate_fastmaxsim.recipes.mining.teacher import digest_of, files_digest, grade, load_teacher
from pylate_fastmaxsim.recipes.models.load import load_model
from pylate_fastmaxsim.recipes.training.arguments import training_arguments

LOCK_FILE = "lock"
# In the folder of what is unfinished: data that are there already are to be replaced by it.
STARTED_OVER = "started-over"
PAIRS = "mining.pairs or mining.corpus"


def mine(recipe: Recipe, resume: bool = True) -> dict[str, Any]:
    """Write distillation data to ``data.name``, in the layout of ``lightonai/ms-marco-en-bge``.

    Each row holds the positive of a pair and its hardest negatives among all positives of the data and the documents of
    ``mining.corpus``, best first, with the teacher's scores. What is computed is kept in ``data.name`` +
    ``.unfinished`` until the data set is complete, so a run that was interrupted goes on from there. Settings may
    change in between: what they do not concern is kept, as the search is for other margins or another teacher.

    Under a distributed launcher every process calls this, and each computes a share of what is missing, in a folder
    that all must see; only the main process writes the data set. The result does not depend on the number of
    processes, which may change when a run goes on. When a process fails, the launcher ends the others. Who waits for
    another longer than the 30 minutes of ``torch.distributed`` fails, so that no part should take as long as that.

    Parameters
    ----------
    recipe
        With a ``mining`` section, and ``data.source: distillation``.
    resume
        Otherwise mining starts over, and its files take the place of earlier ones when all are there; whatever else is
        in ``data.name`` stays.

    Returns
    -------
    Numbers of queries, documents, rows written and rows left out for lack of negatives; also in ``mining.json``.

    Raises
    ------
    RecipeError
        The recipe does not mine, its pairs or models cannot be loaded, the data set is complete and of other settings,
        pairs, documents or models, or in a folder that not all processes see, another command mines it at this moment,
        a model gives scores that are not finite, or memory has run out.
    """
    section = recipe.mining
    if section is None or recipe.data.source != "distillation":
        raise RecipeError("fastmaxsim mine needs a recipe with a mining section and data.source distillation.")
    if recipe.model.name_or_path is None:
        raise RecipeError("model.build does not apply to fastmaxsim mine, which searches with model.name_or_path.")
    device = training_arguments(recipe).device
    processes = PartialState()
    output = Path(recipe.data.name)
    if output.is_symlink():  # the folder that it names is put in place, which no rename does through a link
        output = output.resolve()
    if output.name in ("", ".."):  # nothing can be written beside it
        raise RecipeError(f"data.name must be a folder for mining to write, got {recipe.data.name!r}.")
    unfinished = output.with_name(output.name + ".unfinished")
    mined = f"data.name: {output} is being mined by another command; wait until it ends, or choose another folder."
    only = only_command("data.name", unfinished, LOCK_FILE, mined)
    with only if processes.is_main_process else nullcontext():
        try:
            return _mine(recipe, resume, device, processes, output, unfinished)
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            raise RecipeError(
                f"mining.batch_size of {section.batch_size} is more than fits into memory; what is done is kept, and "
                "the same command with a smaller one goes on from there."
            ) from error


def _mine(
    recipe: Recipe, resume: bool, device: torch.device, processes: PartialState, output: Path, unfinished: Path
) -> dict[str, Any]:
    section = recipe.mining
    _require_shared(output, unfinished, processes)
    settings = {"mining": asdict(section), "model": asdict(recipe.model), "seed": recipe.training.seed}
    finished = _finished(output, unfinished, recipe, settings, processes, resume)
    if finished is not None:
        return finished
    # All that a recipe can have wrong is found before hours of search, and before anything is removed.
    with processes.main_process_first():
        pairs = load_pairs(section)
    model = load_model(recipe.model, device, recipe.training.seed)
    teacher = load_teacher(section, device)
    if processes.is_main_process and not resume:
        for path in unfinished.iterdir():
            if path.is_dir():
                shutil.rmtree(path)
            elif path.name not in (LOCK_FILE, OLD_SUMMARY):
                path.unlink()
        # Earlier data stay until there are others, which may be several commands later.
        (unfinished / STARTED_OVER).touch()
    work = Work(unfinished, processes)
    inputs = _inputs(recipe, pairs)
    common = {
        PAIRS: inputs[PAIRS],
        "model": settings["model"] | {"files": inputs["model"]},
        "training.seed": settings["seed"],
    }
    scores, found = search_documents(model, pairs, section, work, common)
    lowest = lowest_positive_scores(model, pairs, section, work, common)
    chosen = hard_negatives(pairs, section, scores, found, lowest)
    del model
    candidates = [(query, [document, *chosen[query]]) for query, document in pairs.rows if query in chosen]
    if not candidates:
        raise RecipeError(
            "mining: no query has as many negatives as mining.num_negatives; lower it or loosen the margins, for which "
            "the search is kept, or raise mining.range_max, for which it begins anew."
        )
    graded = grade(teacher, inputs["mining.teacher"], pairs, candidates, section, work)
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
        digest = hashlib.sha256(digest_of(pairs, candidates).encode() + graded.tobytes()).hexdigest()
        with progress_shown():
            record = summary | {"digest": digest, "settings": settings, "inputs": inputs}
            write_data(unfinished / "data", pairs, candidates, graded, record)
        put_into_place(unfinished / "data", output, unfinished)
        # First: without the parts this would have the next command start over once more.
        (unfinished / STARTED_OVER).unlink(missing_ok=True)
        shutil.rmtree(unfinished)
    processes.wait_for_everyone()
    return summary


def _require_shared(output: Path, unfinished: Path, processes: PartialState) -> None:
    """Refuse processes that would look in vain for what the others have computed, when it all is.

    Raises
    ------
    RecipeError
        Not all of them see the folder that the main process has made.
    """
    processes.wait_for_everyone()  # until the main process has made it
    if not all(gather_object([unfinished.is_dir()])):
        raise RecipeError(
            f"data.name: {output} must be on a disk that all machines share, but not all processes find {unfinished} there."
        )


def _inputs(recipe: Recipe, pairs: Pairs) -> dict[str, str | None]:
    """Digests of what may change under the same name, by what the recipe calls it."""
    return {
        PAIRS: pairs.digest,
        "model": files_digest("model.name_or_path", recipe.model.name_or_path),
        "mining.teacher": files_digest("mining.teacher", recipe.mining.teacher),
    }


def _finished(
    output: Path, unfinished: Path, recipe: Recipe, settings: dict[str, Any], processes: PartialState, resume: bool
) -> dict[str, Any] | None:
    """The summary where mining is done already, else None."""
    if not output.exists() or (output.is_dir() and not any(output.iterdir())):
        return None
    if not (output / SUMMARY_FILE).exists():
        if (unfinished / OLD_SUMMARY).exists():  # interrupted while earlier data were replaced
            return None
        raise RecipeError(f"data.name must be a folder for mining to write, but {output} holds something else.")
    if not resume or (unfinished / STARTED_OVER).exists():
        return None
    earlier = read_summary(output)
    # As JSON, where a tuple is a list.
    if _deciding(earlier["settings"]) != _deciding(json.loads(json.dumps(settings))):
        raise RecipeError(
            f"data.name: {output} was mined with other settings; keep them, choose another folder, or start over with --no-resume."
        )
    # Data mined by an earlier version says nothing of its inputs.
    if inputs := earlier.get("inputs"):
        with processes.main_process_first():
            now = _inputs(recipe, load_pairs(recipe.mining))
        changed = [name for name in inputs if inputs[name] != now[name]]
        if changed:
            raise RecipeError(
                f"data.name: {output} was mined with other content of {', '.join(changed)} than there is now; bring it "
                "back, choose another folder, or start over with --no-resume."
            )
    return {key: value for key, value in earlier.items() if key not in ("digest", "settings", "inputs")}


def _deciding(settings: dict[str, Any]) -> dict[str, Any]:
    """Settings, also of an earlier version, without those that say only how the work is cut into pieces."""
    pieces = ("batch_size", "documents_per_part", "rows_per_part")
    mining = with_defaults(settings["mining"], MiningSection)
    return settings | {
        "mining": {key: value for key, value in mining.items() if key not in pieces},
        "model": with_defaults(settings["model"], ModelSection),
    }
