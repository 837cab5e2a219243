"""`python -m keyhole` is the command `keyhole`."""

import sys

from keyhole.cli import main

if __name__ == "__main__":
    sys.exit(main())
