"""``python -m pylate_fastmaxsim.compare SCRIPT.py ARGS``, for launchers that start a module: ``accelerate launch -m``."""

import sys

from pylate_fastmaxsim.comparison.script import compare_script


def main() -> None:
    """Compare the script of the command line; see :func:`pylate_fastmaxsim.comparison.script.compare_script`."""
    compare_script(sys.argv[1:], prog="python -m pylate_fastmaxsim.compare")


if __name__ == "__main__":
    main()
