"""What tests/recipes/mining/test_mining_launched.py starts in two processes: mining.

The second fails at a given file, reads late, or is on a machine that does not share the disk of the first.
"""

import json
import os
import sys
import time
from pathlib import Path

import numpy as np

from pylate_fastmaxsim.cli import main
from pylate_fastmaxsim.recipes.mining import resumable, teacher
from pylate_fastmaxsim.reporting import progress

RANK = int(os.environ["RANK"])
folder, failing = Path(sys.argv[1]), sys.argv[2]
written = []
write = resumable.replace_file


def noting(file: Path, writer) -> None:
    if RANK == 1 and file.name.startswith(failing) and any(name.startswith(failing) for name in written):
        raise RuntimeError("the second process is broken")
    write(file, writer)
    written.append(file.name)
    (folder / f"written-{RANK}.json").write_text(json.dumps(written))


def load_late(file: Path) -> np.ndarray:
    time.sleep(0.5)
    return resumable.read_part(file)


resumable.replace_file = noting
progress.LINE_SECONDS = 0  # every line is shown
if RANK == 1 and failing == "late":
    teacher.read_part = load_late
apart = ["--set", f"data.name={folder / 'apart'}"] if RANK == 1 and failing == "apart" else []
sys.argv[1:] = ["mine", str(folder / "mine.yaml"), *apart]
main()
