"""What tests/test_mining_launched.py starts in two processes: mining, in which the second fails at a given file."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

from pylate_fastmaxsim.recipes import mining_parts
from pylate_fastmaxsim.recipes.commands import app

RANK = int(os.environ["RANK"])
folder, failing = Path(sys.argv[1]), sys.argv[2]
written = []
write = mining_parts.write_whole


def noting(file: Path, writer) -> None:
    if RANK == 1 and file.name.startswith(failing) and any(name.startswith(failing) for name in written):
        raise RuntimeError("the second process is broken")
    write(file, writer)
    written.append(file.name)
    (folder / f"written-{RANK}.json").write_text(json.dumps(written))


mining_parts.write_whole = noting
app(["mine", str(folder / "mine.yaml")])
