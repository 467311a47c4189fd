"""``fastmaxsim`` that ends where it takes too long, with what every thread was doing."""

import faulthandler

from pylate_fastmaxsim.cli import main

DEADLINE = 200  # seconds

if __name__ == "__main__":
    faulthandler.dump_traceback_later(DEADLINE, exit=True)
    main()
