"""Compile kernels before they are needed: those of batches of given sizes, or those of a recipe."""

from __future__ import annotations

import os
from collections.abc import Iterable

from pylate_fastmaxsim.precompile.processes import Compiled, Compiling
from pylate_fastmaxsim.precompile.shapes import BatchShape, calls_of


def warmup(shapes: BatchShape | Iterable[BatchShape] | str | os.PathLike, *, processes: int | None = None) -> Compiled:
    """Compile every kernel that batches of these sizes can run, into Triton's cache on disk, in several processes.

    A first call that compiles takes seconds; after a warm-up it finds its kernels on disk, in this process and in all
    later ones on the same GPU and the same versions.

    Parameters
    ----------
    shapes
        Sizes of the batches, one or several. Or the file of a recipe: what ``fastmaxsim warmup`` compiles.
    processes
        How many processes compile. None: one for each CPU core, at most 16. Each takes half a GiB of the GPU's memory.

    Returns
    -------
    Compiled
        How many kernels are new in the cache (``kernels``), how many ``processes`` worked, and for how many ``seconds``.

    Raises
    ------
    RuntimeError
        There is no GPU that runs the kernels, or one of them cannot be compiled.
    TypeError
        ``shapes`` are something else.
    RecipeError
        The recipe is wrong, or trains without kernels here.

    Notes
    -----
    Kernels are also compiled for where tensors lie: slices of int64 tensors that begin at an odd element, for example,
    compile once more when they are first met. The kernels of sparse search are not among them; NVRTC compiles those in
    half a second.

    Examples
    --------
    >>> from pylate_fastmaxsim import BatchShape, warmup
    >>> shape = BatchShape(queries=128, query_tokens=32, documents=256, document_tokens=300)
    >>> warmup(shape)  # doctest: +SKIP
    Compiled(kernels=..., processes=16, seconds=...)
    """
    if isinstance(shapes, (str, os.PathLike)):
        from pylate_fastmaxsim.recipes.load import load_recipe
        from pylate_fastmaxsim.recipes.training.warmup import compile_recipe

        return compile_recipe(load_recipe(shapes), processes)
    shapes = list(shapes) if isinstance(shapes, Iterable) else [shapes]
    for shape in shapes:
        if not isinstance(shape, BatchShape):
            raise TypeError(f"warmup: shapes must be BatchShapes or the file of a recipe, got {type(shape).__name__}.")
    with Compiling([call for shape in shapes for call in calls_of(shape)], processes) as compiling:
        return compiling.result()
