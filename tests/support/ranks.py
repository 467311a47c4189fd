"""Runs the cases of a test module in real processes of one group."""

import gc
import importlib
import os
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

import pylate_fastmaxsim
from pylate_fastmaxsim.integrations.encoding import attention as encoding_attention
from pylate_fastmaxsim.integrations.encoding import encode as encoding_encode
from tests.support.models import build_model

SECONDS = 240


def run_cases(module: str, ranks: int, folder: Path, backend: str = "gloo") -> Callable[[str], list[str]]:
    """What each rank says of a case: "passed", or a traceback. With the backend "nccl" each has a GPU of its own."""
    # One group of processes runs all cases, which take less time than its start. Each is given the folder of an encoder.
    # Its local layers see all of a query, so that queries are encoded with packed documents.
    build_model(folder / "modernbert", "modernbert", local_attention=24)
    # What is imported already takes a process ten seconds; CUDA cannot be used in a copy.
    method = "fork" if sys.platform == "linux" and not torch.cuda.is_initialized() and backend == "gloo" else "spawn"
    arguments = module, ranks, str(folder), backend
    context = mp.start_processes(_process, arguments, nprocs=ranks, join=False, start_method=method)
    deadline = time.monotonic() + SECONDS
    while not context.join(timeout=1):
        if time.monotonic() > deadline:
            for process in context.processes:
                process.kill()
            break

    def outcome(name: str) -> list[str]:
        files = [folder / f"{name}-{rank}" for rank in range(ranks)]
        return [file.read_text() if file.exists() else "did not end" for file in files]

    return outcome


def _process(rank: int, module: str, ranks: int, folder: str, backend: str) -> None:
    torch.set_num_threads(1)
    if backend == "nccl":
        torch.cuda.set_device(rank)
    dist.init_process_group(backend, init_method=f"file://{folder}/rendezvous", rank=rank, world_size=ranks)
    searched = encoding_attention.variable_length_attention
    cases = importlib.import_module(module).CASES
    gc.freeze()  # as in conftest.py
    for name, case in cases.items():
        try:
            case(folder)
            said = "passed"
        except Exception:
            said = traceback.format_exc()
        encoding_attention.variable_length_attention = searched
        pylate_fastmaxsim.disable()
        encoding_encode.release()
        (Path(folder) / f"{name}-{rank}").write_text(said)
    dist.destroy_process_group()
    # Python does not end here: while it does, a thread of Gloo that still drops tensors of the last exchange aborts it.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)
