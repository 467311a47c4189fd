"""``accelerate launch`` of launched.py in two processes."""

import subprocess
import sys
from pathlib import Path

from tests.support.paths import SUPPORT

LAUNCH = ["accelerate.commands.launch", "--num_processes=2", "--num_machines=1"]
LAUNCH += ["--mixed_precision=no", "--dynamo_backend=no", "--main_process_port=0"]
WAYS = {
    # Not --cpu, for which accelerate needs MPI; training.use_cpu makes it two processes on the CPU.
    "ddp": ["--multi_gpu"],
    # Version 1 needs a GPU. So does the loading that is left out, which begins with an empty model.
    "fsdp": ["--use_fsdp", "--fsdp_version=2", "--fsdp_auto_wrap_policy=TRANSFORMER_BASED_WRAP"]
    + ["--fsdp_transformer_layer_cls_to_wrap=ModernBertEncoderLayer", "--fsdp_cpu_ram_efficient_loading=false"]
    + ["--fsdp_sync_module_states=false", "--fsdp_state_dict_type=FULL_STATE_DICT"],
}


def launch(way: str, folder: Path, recipes: list[Path], layer: str = "ModernBertEncoderLayer"):
    options = [option.replace("ModernBertEncoderLayer", layer) for option in WAYS[way]]
    return run(*options, str(SUPPORT / "launched.py"), str(folder), *map(str, recipes))


def run(*arguments: str) -> subprocess.CompletedProcess:
    command = [sys.executable, "-m", *LAUNCH, *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=400)
