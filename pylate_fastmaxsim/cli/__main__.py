"""``python -m pylate_fastmaxsim.cli``: the command ``fastmaxsim``, for launchers that start a module."""

from pylate_fastmaxsim.cli import main

if __name__ == "__main__":
    main()
