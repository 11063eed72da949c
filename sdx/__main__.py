"""`python -m sdx` is `sdx`."""

import sys

from sdx.cli import main

if __name__ == "__main__":
    sys.exit(main())
