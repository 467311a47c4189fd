"""``python -m pylate_fastmaxsim.run SCRIPT.py ARGS``, for launchers that start a module: ``accelerate launch -m``."""

import sys

from pylate_fastmaxsim.integrations.run_script import run_script

if __name__ == "__main__":
    run_script(sys.argv[1:], prog="python -m pylate_fastmaxsim.run")
