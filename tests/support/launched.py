"""What test_launched.py starts in two processes: recipes trained whole, interrupted, and to the end.

Both processes note each file that they write.
"""

import gc
import json
import os
import signal
import sys
import time
from pathlib import Path

RANK = int(os.environ["RANK"])
FSDP = os.environ.get("ACCELERATE_USE_FSDP") == "true"
INTERRUPTED_AT = 3
written: set[str] = set()


def note_writing(event: str, arguments: tuple) -> None:
    path = None
    if event == "open" and isinstance(arguments[2], int) and arguments[2] & (os.O_WRONLY | os.O_RDWR):
        path = arguments[0]
    elif event in ("os.rename", "shutil.move", "shutil.copyfile"):
        path = arguments[1]
    elif event == "shutil.rmtree" or (event == "os.remove" and arguments[1] == -1):  # else of a folder being removed
        path = arguments[0]
    # Both may be the first to import a module.
    if isinstance(path, (str, os.PathLike)) and "__pycache__" not in str(path):
        written.add(os.path.abspath(path))


sys.addaudithook(note_writing)

import accelerate.state  # noqa: E402  (all that is written counts)
import pytest  # noqa: E402
import safetensors.torch  # noqa: E402
import torch  # noqa: E402
from accelerate.utils import DistributedType  # noqa: E402
from torch.distributed.fsdp import FSDPModule  # noqa: E402
from transformers import Trainer, TrainerCallback, TrainerState  # noqa: E402

from pylate_fastmaxsim.recipes.load import load_recipe  # noqa: E402
from tests.support.recipe_runs import train_with  # noqa: E402

serialize = safetensors.torch.serialize_file


def serialize_file(tensors, path, *args, **kwargs):
    written.add(os.path.abspath(path))  # written by native code, which raises no audit event
    return serialize(tensors, path, *args, **kwargs)


safetensors.torch.serialize_file = serialize_file

if FSDP:
    initialize = accelerate.state.AcceleratorState.__init__
    plugins = []

    def initialize_divided(self, *args, fsdp_plugin=None, **kwargs):
        """On a CPU accelerate would run DistributedDataParallel instead, without a word."""
        initialize(self, *args, fsdp_plugin=fsdp_plugin, **kwargs)
        if fsdp_plugin is not None:
            plugins.append(fsdp_plugin)
        if plugins:
            self.distributed_type, self.fsdp_plugin = DistributedType.FSDP, plugins[-1]
            self.device = torch.device("cpu")

    accelerate.state.AcceleratorState.__init__ = initialize_divided


save_rng_state, save_to_json = Trainer._save_rng_state, TrainerState.save_to_json


def save_rng_state_late(self, folder: str) -> None:
    """What the second process writes of a checkpoint comes last."""
    time.sleep(RANK / 2)
    save_rng_state(self, folder)


def save_to_json_of_whole(self, path: str) -> None:
    assert Path(path).with_name("rng_state_1.pth").exists(), f"{path} is written before the checkpoint is complete"
    save_to_json(self, path)


Trainer._save_rng_state, TrainerState.save_to_json = save_rng_state_late, save_to_json_of_whole


class Interrupt(TrainerCallback):
    """Ctrl-C, which reaches all processes of a launcher."""

    def on_step_begin(self, args, state, control, model=None, **kwargs):
        assert isinstance(model, FSDPModule) == FSDP
        if state.global_step == INTERRUPTED_AT:
            os.kill(os.getpid(), signal.SIGINT)


def train(file: str, output: Path, interrupt: bool = False) -> dict:
    return train_with(load_recipe(file, [f"output_dir={output}"]), *([Interrupt()] if interrupt else []))


def main() -> None:
    gc.freeze()  # as in conftest.py
    folder = Path(sys.argv[1])
    for recipe in sys.argv[2:]:
        name = Path(recipe).stem
        whole = train(recipe, folder / f"{name}-whole")
        with pytest.raises(KeyboardInterrupt):
            train(recipe, folder / f"{name}-parts", interrupt=True)
        parts = train(recipe, folder / f"{name}-parts")
        (folder / f"{name}-{RANK}.json").write_text(json.dumps({"whole": whole, "parts": parts}))
    (folder / f"written-{RANK}.json").write_text(json.dumps(sorted(written)))


main()
