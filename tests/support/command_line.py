"""Run ``fastmaxsim`` in this process."""

import io
import os
import re
import sys
from collections.abc import Mapping, Sequence
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from unittest.mock import patch

from pylate_fastmaxsim.cli import main


@dataclass
class Done:
    """What a command has printed, but for how far it was every 30 seconds, how it ended, and what it did not catch."""

    stdout: str
    stderr: str
    exit_code: int = 0
    exception: Exception | None = None

    @property
    def output(self) -> str:
        return self.stdout + self.stderr


def fastmaxsim(arguments: Sequence[object], env: Mapping[str, str] | None = None, code: int | None = None) -> Done:
    """Run the command with these arguments and variables; where ``code`` is given, it ends so, with 2 in one line."""
    stdout, stderr, status, exception = io.StringIO(), io.StringIO(), 0, None
    given = patch.object(sys, "argv", ["fastmaxsim", *map(str, arguments)])
    with given, patch.dict(os.environ, env or {}), redirect_stdout(stdout), redirect_stderr(stderr):
        try:
            main()
        except SystemExit as stop:
            if isinstance(stop.code, str):
                print(stop.code, file=sys.stderr)
            status = stop.code if isinstance(stop.code, int) else int(stop.code is not None)
        except Exception as error:
            status, exception = 1, error
    # A slow machine takes 30 seconds where others take five.
    said = re.sub(r"^\d+ s, .*\n", "", stderr.getvalue(), flags=re.MULTILINE)
    done = Done(stdout.getvalue(), said, status, exception)
    assert code in (None, status), done
    assert code != 2 or (said.startswith("fastmaxsim: ") and said.count("\n") == 1), done
    return done
