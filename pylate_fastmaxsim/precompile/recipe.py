"""Compile the kernels of a recipe's training, so that a run finds them in Triton's cache."""

import os
import tempfile
import time
from dataclasses import dataclass
from itertools import product

import torch
from datasets import Dataset
from transformers import TrainerCallback

from pylate_fastmaxsim._winners import queries_at_once
from pylate_fastmaxsim.ops.pooled import state_bytes
from pylate_fastmaxsim.pooling import Pooling, TopK
from pylate_fastmaxsim.precompile.processes import Compiled, cached_kernels, compile_calls
from pylate_fastmaxsim.precompile.shapes import BatchShape, Call, calls_of
from pylate_fastmaxsim.recipes.config.schema import PoolingSection, Recipe
from pylate_fastmaxsim.recipes.errors import RecipeError
from pylate_fastmaxsim.recipes.models.load import HostModel, encoder_of, kind_of, load_model
from pylate_fastmaxsim.recipes.plugin import plugin_of, reason_against_plugin
from pylate_fastmaxsim.recipes.pooling import final_pooling
from pylate_fastmaxsim.recipes.training.arguments import ONLY_STEPS, training_arguments
from pylate_fastmaxsim.recipes.training.inputs import load_data, prepare
from pylate_fastmaxsim.reporting.table import Table


@dataclass(frozen=True)
class WarmStep:
    """A batch of ``rows`` rows, and the seconds of the first and of the second training step on it."""

    rows: int
    first: float
    again: float


@dataclass(frozen=True)
class Warmed:
    """Kernels of scores that were compiled in parallel, the training steps after them, and kernels of both together."""

    ahead: Compiled
    steps: list[WarmStep]
    kernels: int

    def table(self, name: str) -> Table:
        """The time of the first step on each size of batch, and of the same step again."""
        rows = [("rows in the batch", "first step", "again")]
        rows += [(str(step.rows), f"{step.first:.2f} s", f"{step.again:.2f} s") for step in self.steps]
        return Table(f"{name}: compiled", rows, left=0)

    def counts(self) -> str:
        """Numbers of new kernels and of those that were compiled before the first step."""
        return (
            f"{self.kernels} new kernels in Triton's cache, {self.ahead.kernels} of them before the first step, by "
            f"{self.ahead.processes} processes in {self.ahead.seconds:.0f} s."
        )


def reason_against_warmup(recipe: Recipe) -> str | None:
    """A sentence that says why training this recipe compiles no kernel; None if it does."""
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise RecipeError("warmup needs one process, whose cache all of them share; start it without a launcher.")
    if (reason := reason_against_plugin(recipe.fast)) is not None:
        return f"{reason}, so there is nothing to compile."
    if not torch.cuda.is_available() or recipe.training.use_cpu:
        return f"{recipe.name} trains on a CPU here, where there is nothing to compile."
    return None


def compile_recipe(recipe: Recipe, processes: int | None = None) -> Compiled:
    """:func:`warm_up` for :func:`pylate_fastmaxsim.warmup`; RuntimeError where there is nothing to compile."""
    if reason := reason_against_warmup(recipe):
        raise RuntimeError(f"warmup: {reason}")
    began = time.perf_counter()
    warmed = warm_up(recipe, processes)
    return Compiled(warmed.kernels, warmed.ahead.processes, time.perf_counter() - began)


def warm_up(recipe: Recipe, processes: int | None = None) -> Warmed:
    """Compile the kernels of scores in parallel, train two steps on each batch size of the recipe, discard the result.

    The kernels compiled first are those of the batch sizes, lengths and poolings that the recipe can come to, also later
    in its schedule. The steps compile what is left: the encoder's kernels, and graphs of torch.compile. Their batches
    are the recipe's own. The second size is that of an epoch's last batch. Only the files of ``prepare`` are written.

    Returns
    -------
    The steps have one entry per batch size. The difference between its two steps is the time that training saves.
    """
    kind = kind_of(recipe.model)
    prepared = prepare(recipe)
    rows = load_data(prepared).train
    if recipe.data.streaming:
        rows = Dataset.from_list(list(rows.take(recipe.training.per_device_train_batch_size)))
    steps, before = [], cached_kernels()
    with tempfile.TemporaryDirectory() as scratch, plugin_of(recipe.fast):
        arguments = training_arguments(
            recipe,
            kind,
            output_dir=scratch,
            max_steps=2,
            gradient_accumulation_steps=1,
            batch_sampler="batch_sampler",  # each epoch is a single batch, whatever is in it
            disable_tqdm=True,
            **ONLY_STEPS,
        )
        model = load_model(prepared.model, arguments.device, recipe.training.seed)
        sizes = batch_sizes(len(rows), recipe)
        ahead = Compiled(0, 0, 0.0)
        if arguments.device.type == "cuda":
            dtype = torch.bfloat16 if arguments.bf16 else torch.float16 if arguments.fp16 else torch.float32
            ahead = compile_calls(calls_of_recipe(recipe, model, rows, sizes, dtype), processes)
        for size in sizes:
            arguments.per_device_train_batch_size = size
            trainer = kind.build_trainer(recipe.loss, model, rows.select(range(size)), arguments)
            times = _StepTimes()
            trainer.add_callback(times)
            trainer.train()
            steps.append(WarmStep(size, *times.seconds))
    return Warmed(ahead, steps, cached_kernels() - before)


def calls_of_recipe(
    recipe: Recipe, model: HostModel, rows: Dataset, sizes: list[int], dtype: torch.dtype
) -> list[Call]:
    """Calls of batches of these sizes: the projection and the scores, alone and with all gradients.

    Documents are as PyLate's losses have them under the flag: with a mask of the tokens that count, and in another order
    than their columns. Of SPLADE models it is the pooling of packed texts, of other kinds nothing.
    """
    if recipe.model.kind == "splade":
        # Texts whose winners are stored in one byte, and longer ones; other sizes do not matter to the kernels.
        dim = encoder_of(model).get_output_embeddings().weight.shape[1]
        head = {"dim": dim, "dtype": dtype, "masked": ("nothing",), "poolings": (), "splade": True}
        shapes = [BatchShape(1, 1, 1, tokens, **head) for tokens in (255, 256)]
    elif recipe.model.kind == "colbert":
        shapes = shapes_of_recipe(recipe, model, rows, sizes, dtype)
    else:
        return []
    return [call for shape in shapes for call in calls_of(shape) if call.gradients in (None, "both")]


def shapes_of_recipe(
    recipe: Recipe, model: HostModel, rows: Dataset, sizes: list[int], dtype: torch.dtype
) -> list[BatchShape]:
    """Batches of these sizes with the longest texts that the model takes, and shorter ones that have other kernels."""
    distillation = recipe.loss.name == "distillation"
    ways = len(rows[0][rows.column_names[-1]]) if distillation else len(rows.column_names) - 1
    # Tiles depend on the power of two that holds a query, and winners on whether a document is longer than 255.
    shortest = model.query_length.bit_length() if model.do_query_expansion else 3
    lengths = {2**power for power in range(shortest, model.query_length.bit_length())} | {model.query_length}
    heads = [module for module in model if type(module).__name__ == "Dense"]
    poolings = poolings_of(recipe.loss.pooling)
    # With a pooling of its own a loss leaves rows of zeros out, in queries as well.
    masked = "documents" if model.do_query_expansion and recipe.loss.pooling is None else "both"
    shapes = []
    for size, query_tokens, document_tokens in product(
        sizes, sorted(lengths), sorted({min(255, model.document_length), model.document_length})
    ):
        at_once = size
        if recipe.loss.name == "cached_contrastive":
            kept = max(state_bytes(pooling, document_tokens, dtype) for pooling in poolings)
            at_once = queries_at_once(query_tokens, size * ways, kept)
            at_once = min(size, max(at_once, recipe.loss.score_mini_batch_size or 0))
        shapes += [
            BatchShape(
                queries=queries,
                query_tokens=query_tokens,
                documents=size * ways,
                document_tokens=document_tokens,
                dim=model.get_sentence_embedding_dimension(),
                dtype=dtype,
                candidates=ways if distillation else None,
                masked=(masked,),
                zero_floor=recipe.fast.stock_masking,
                poolings=poolings,
                hidden=heads[0].in_features if len(heads) == 1 else None,
            )
            for queries in {at_once, size % at_once or at_once}
        ]
    return shapes


def poolings_of(section: PoolingSection | None) -> tuple[Pooling, ...]:
    """The poolings of a training whose kernels differ: every k that a schedule comes to."""
    end = final_pooling(section)
    if not isinstance(end, TopK) or section.schedule is None:
        return (end,)
    ks = sorted((round(section.start), end.k))
    return tuple(TopK(k) for k in range(max(1, ks[0]), ks[1] + 1))


def batch_sizes(rows: int, recipe: Recipe) -> list[int]:
    """The size of a full batch, if there is one, and of an epoch's last batch, if that is smaller and not dropped."""
    size = recipe.training.per_device_train_batch_size
    rest = 0 if recipe.training.dataloader_drop_last else rows % size
    return [*([size] if rows >= size else []), *([rest] if rest else [])]


class _StepTimes(TrainerCallback):
    """Seconds of each step, without loading its batch."""

    def __init__(self) -> None:
        self.seconds: list[float] = []
        self._begun = 0.0

    def on_step_begin(self, args, state, control, **kwargs) -> None:
        self._begun = time.perf_counter()

    def on_step_end(self, args, state, control, **kwargs) -> None:
        if args.device.type == "cuda":
            torch.cuda.synchronize(args.device)
        self.seconds.append(time.perf_counter() - self._begun)
