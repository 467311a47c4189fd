"""``python -m pylate_fastmaxsim.compare SCRIPT.py ARGS``, for launchers that start a module: ``accelerate launch -m``."""

import sys

from pylate_fastmaxsim.comparison.script import compare_script

if __name__ == "__main__":
    compare_script(sys.argv[1:], prog="python -m pylate_fastmaxsim.compare")
