"""Work that is done part by part, each part a file, so that an interrupted run goes on from there."""

import functools
import json
import logging
import zipfile
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from accelerate import PartialState

from pylate_fastmaxsim.files.record import read_record, write_record
from pylate_fastmaxsim.files.replace import replace_file
from pylate_fastmaxsim.recipes.config.schema import MiningSection
from pylate_fastmaxsim.reporting.progress import Progress

logger = logging.getLogger(__name__)

# The name of the array of a part that is one.
_ARRAY = "values"

# The content of a part, for its items; it updates the bar.
Compute = Callable[[slice, Progress], np.ndarray | dict[str, np.ndarray]]


@dataclass(frozen=True)
class Work:
    """Parts of the work of a section, each a file in ``folder``, which ``processes`` share."""

    folder: Path
    processes: PartialState
    section: MiningSection

    def parts(
        self,
        stage: str,
        settings: dict[str, Any],
        title: str,
        unit: str,
        total: int,
        per: str | None,
        compute: Compute,
    ) -> list[Path]:
        """Compute the missing files of a stage for ``total`` items, and return all of them.

        ``per`` is the key of the section that says how many items a file has; None for one file. Files of other
        ``settings`` are removed.
        """
        step = total if per is None else getattr(self.section, per)
        settings = settings if per is None else settings | {f"mining.{per}": step}
        if self.processes.is_main_process:
            # As JSON, where a tuple is a list.
            self._keep_only(stage, json.loads(json.dumps(settings)))
        self.processes.wait_for_everyone()
        parts = [slice(begin, min(begin + step, total)) for begin in range(0, total, step)]
        files = [self.folder / f"{stage}-{part.start:010d}.npz" for part in parts]
        missing = [number for number, file in enumerate(files) if not file.exists()]
        # All processes must find the same parts missing before one writes.
        self.processes.wait_for_everyone()
        count, main = self.processes.num_processes, self.processes.is_main_process
        own = missing[self.processes.process_index :: count]
        others = sum(parts[number].stop - parts[number].start for number in set(missing).difference(own))
        left = sum(parts[number].stop - parts[number].start for number in own)
        name = f"{title} (process 1 of {count})" if count > 1 else title
        with Progress(name, total - others, total - others - left, unit, disable=not main) as bar:
            for number in own:
                result = compute(parts[number], bar)
                replace_file(files[number], functools.partial(_save, result))
        self.processes.wait_for_everyone()
        return files

    def _keep_only(self, stage: str, settings: dict[str, Any]) -> None:
        """Remove the files of a stage if they are of other settings, and those that are damaged."""
        record = self.folder / f"settings-{stage}.json"
        try:
            earlier = read_record(record) or {}
        except ValueError:
            earlier = {}
        stale = list(self.folder.glob(f"{stage}-*.npz"))
        if earlier == settings:
            for file in stale:
                if not _is_whole(file):
                    logger.warning("mining: %s is damaged, so it is computed again.", file)
                    file.unlink()
            return
        for file in stale:
            file.unlink()
        if stale:
            changed = [name for name in {**settings, **earlier} if earlier.get(name) != settings.get(name)]
            logger.warning(
                "mining: %d finished parts of the stage %s are computed again, because these changed: %s.",
                len(stale),
                stage,
                ", ".join(changed),
            )
        write_record(record, settings)


def read_part(file: Path) -> np.ndarray:
    """The array that a part consists of."""
    with np.load(file) as arrays:
        return arrays[_ARRAY]


def read_parts(files: list[Path]) -> np.ndarray:
    """The arrays of parts, one behind the other."""
    return np.concatenate(list(map(read_part, files)))


def _is_whole(part: Path) -> bool:
    try:
        with zipfile.ZipFile(part) as members:
            return members.testzip() is None
    except (OSError, zipfile.BadZipFile, zlib.error, ValueError, NotImplementedError, RuntimeError, EOFError):
        return False


def _save(arrays: np.ndarray | dict[str, np.ndarray], file: str) -> None:
    np.savez(file, **(arrays if isinstance(arrays, dict) else {_ARRAY: arrays}))
