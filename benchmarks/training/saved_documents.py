"""What ``maxsim(..., save_documents="int8")`` saves: in whole training steps, and of what MaxSim alone keeps.

    python -m benchmarks.training.saved_documents                                   # on a GPU, about four minutes
    python -m benchmarks.training.saved_documents --layers 1 --batches 2 --cached 4 --output /tmp/saved.json    # on a CPU

Contrastive steps of ModernBERT-base (see cell.py) with the plugin, and a step of GradCache, each with documents saved as
they are and as int8, each in a process of its own. The plugin has no option for it: its losses get a ``maxsim`` that
saves documents so. ``alone`` is what a forward keeps for its backward where nothing but MaxSim needs the documents:
float32 vectors that autocast makes bfloat16 for it.
"""

from __future__ import annotations

import argparse
import os
import sys
from functools import partial
from pathlib import Path

import torch

from benchmarks.harness.paths import RESULTS
from benchmarks.harness.records import environment, write
from benchmarks.harness.tables import table
from benchmarks.harness.workers import ask_apart
from benchmarks.training import cell

SAVED = {"as they are": None, "as int8": "int8"}
COMMAND = ["-m", "benchmarks.training.saved_documents", "--saved"]
FIGURES = ("status", "detail", "step_ms", "steps", "peak_gib", "live_document_tokens", "failure")


def run_cell(saved: str, arguments: list[str]) -> None:
    """A training cell whose losses save documents in a way of ``SAVED``."""
    os.environ["PYLATE_SCORES_BACKEND"] = cell.SCORING["fast"]
    from pylate_fastmaxsim.integrations.pylate import losses
    from pylate_fastmaxsim.ops.maxsim import maxsim

    losses.maxsim = partial(maxsim, save_documents=SAVED[saved])
    sys.argv = [sys.argv[0], "--path", "fast", *arguments]
    cell.main()


def kept_bytes(saved: str, queries: int, documents: int, device: torch.device) -> int | None:
    """What a forward holds for its backward, beside the leaves and the scores."""
    from pylate_fastmaxsim import maxsim

    if device.type != "cuda":
        return None
    vectors = [
        torch.randn(count, length, 128, device=device, requires_grad=True)
        for count, length in ((queries, cell.QUERY_LENGTH), (documents, cell.DOCUMENT_LENGTH))
    ]
    before = torch.cuda.memory_allocated()
    with torch.autocast(device.type, torch.bfloat16):
        scores = maxsim(*vectors, save_documents=SAVED[saved])
    return torch.cuda.memory_allocated() - before - scores.nbytes


def steps(options: argparse.Namespace) -> dict[str, list[str]]:
    """The arguments of each training cell, by its name."""
    small = (
        [] if options.layers is None else ["--layers", str(options.layers), "--steps", "2", "--document-length", "40"]
    )
    found = {
        f"contrastive, {batch}": ["--batch", str(batch), "--batches", "4", "--warmup", "6", "--seconds", "6", *small]
        for batch in options.batches
    }
    cached = ["--loss", "cached_contrastive", "--batch", str(options.cached), "--batches", "1", "--warmup", "1"]
    cached += ["--mini-batch", "128", "--tile", "512", "--warmup-rows", "256", "--steps", "3"]
    return {**found, f"GradCache, {options.cached}": [*cached, *small]} if options.cached else found


def markdown(content: dict) -> str:
    rows = []
    for name, ways in content["steps"].items():
        for saved, result in ways.items():
            if "step_ms" not in result:
                rows.append([name, saved, result.get("detail") or result.get("failure") or result["status"], ""])
                continue
            peak = "" if result["peak_gib"] is None else f"{result['peak_gib']:.3f} GiB"
            rows.append([name, saved, f"{result['step_ms']:,.1f} ms", peak])
    for name, ways in content["alone"].items():
        rows += [[name, saved, "", "" if size is None else f"{size / 2**20:,.1f} MiB"] for saved, size in ways.items()]
    return table(["step", "documents saved", "time", "peak memory, or kept by MaxSim alone"], rows)


def main() -> None:
    if sys.argv[1:2] == ["--saved"]:
        return run_cell(sys.argv[2], sys.argv[3:])
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batches", type=int, nargs="*", default=[128, 256, 512])
    parser.add_argument("--cached", type=int, default=4096, help="batch size of GradCache; 0: without it")
    parser.add_argument("--layers", type=int, help="fewer encoder layers and short texts, for a trial")
    parser.add_argument("--timeout", type=float, default=120, help="seconds a cell may take")
    parser.add_argument("--output", type=Path, default=RESULTS / "saved_documents.json")
    options = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    content: dict = {"environment": environment(), "steps": {}, "alone": {}}
    for batch in filter(None, (*options.batches, options.cached)):
        sizes = {saved: kept_bytes(saved, batch, 2 * batch, device) for saved in SAVED}
        content["alone"][f"MaxSim alone, {batch} x {2 * batch}"] = sizes
    if device.type == "cuda":
        torch.cuda.empty_cache()
    for name, arguments in steps(options).items():
        content["steps"][name] = {}
        for saved in SAVED:
            result = ask_apart([*COMMAND, saved, *arguments], {}, options.timeout)
            content["steps"][name][saved] = {key: result[key] for key in FIGURES if key in result}
            print(name, saved, content["steps"][name][saved], flush=True)
            write(options.output, content)
    print("\n" + markdown(content))
    return None


if __name__ == "__main__":
    main()
