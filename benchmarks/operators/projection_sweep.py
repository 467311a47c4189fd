"""Times of tile sizes of the projection kernels on this GPU, beside cuBLAS products of the same sizes."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable

import torch

from benchmarks.harness.paths import RESULTS
from benchmarks.harness.records import environment, write
from benchmarks.harness.timing import time_calls
from benchmarks.harness.workers import failure
from benchmarks.operators.projection_entries import Shape, make_inputs
from pylate_fastmaxsim.kernels.projection import launch as projection_launch
from pylate_fastmaxsim.kernels.projection import tiles as projection_tiles

CHOICES = {
    "project": [
        projection_tiles.ProjectionTiles(t, 128, k, warps, stages)
        for t, k, warps, stages in itertools.product((64, 128, 256), (64, 128), (4, 8), (3, 4))
    ],
    "hidden_gradient": [
        projection_tiles.ProjectionTiles(t, 128, k, warps, stages)
        for t, k, warps, stages in itertools.product((64, 128), (64, 128), (4, 8), (2, 3))
    ],
    "weight_gradient": [
        projection_tiles.WeightGradientTiles(r, 128, k, warps, stages)
        for r, k, warps, stages in itertools.product((32, 64, 128), (128, 256), (4, 8), (2, 3))
    ],
}
# How many programs compute the weight gradient.
PROGRAMS = (132, 264, 528)


def sweep(shape: Shape) -> None:
    """Time every choice at one shape, print the fastest and write all of them."""
    if not torch.cuda.is_available():
        sys.exit("This measures a CUDA GPU, and there is none.")
    device = torch.device("cuda")
    inputs = make_inputs(shape, device, seed=0)
    hidden, weight = inputs.hidden.detach().flatten(0, -2), inputs.weight.detach()
    saved = projection_launch.forward(hidden, weight, None, True, "highest")
    grad = torch.randn_like(saved[0])

    def backward(tiles: projection_tiles.HeadTiles, *needs: bool) -> tuple[torch.Tensor, ...]:
        return projection_launch.backward(grad, hidden, weight, *saved, True, "highest", *needs, tiles)

    runs: dict[str, Callable] = {
        "project": lambda tiles: projection_launch.forward(hidden, weight, None, True, "highest", tiles)[0],
        "hidden_gradient": lambda tiles: backward(tiles, True, False, False)[0],
        # Includes scales and shifts, which then need no product.
        "weight_gradient": lambda tiles: backward(tiles, False, True, False)[1],
    }
    libraries = {
        "project": lambda: torch.nn.functional.linear(hidden, weight),
        "hidden_gradient": lambda: grad @ weight,
        "weight_gradient": lambda: grad.T @ hidden,
    }
    trials = []
    for name, run in runs.items():
        table = run(projection_tiles.FROM_TABLES)
        best = []
        for tiles in [None, *CHOICES[name]]:
            for programs in PROGRAMS if name == "weight_gradient" and tiles is not None else (None,):
                trial = {"kernel": name, "tiles": "table" if tiles is None else tuple(tiles), "programs": programs}
                default = projection_tiles._ENOUGH_PROGRAMS
                projection_tiles._ENOUGH_PROGRAMS = programs or default
                try:
                    chosen = projection_tiles.HeadTiles(**{name: tiles})
                    error = (run(chosen).double() - table.double()).norm() / table.double().norm()
                    trial |= {
                        "ms": time_calls([lambda t=chosen, r=run: r(t)], device)["ms"],
                        "difference": float(error),
                    }
                    best.append(trial)
                except Exception as problem:  # noqa: BLE001 - tiles that do not fit
                    trial["failure"] = failure(problem)
                finally:
                    projection_tiles._ENOUGH_PROGRAMS = default
                trials.append(trial)
        library = {"kernel": name, "tiles": "cuBLAS, products only", "ms": time_calls([libraries[name]], device)["ms"]}
        trials.append(library)
        print(name, f"cuBLAS, products only: {library['ms']:.4f} ms")
        for trial in sorted(best, key=lambda trial: trial["ms"])[:6] + best[:1]:
            print(f"  {trial['ms']:.4f} ms {trial['tiles']} {trial['programs'] or ''} ({trial['difference']:.1e})")
    content = {"shape": shape.title, "environment": environment(), "trials": trials}
    write(RESULTS / "head_trials.json", content)
