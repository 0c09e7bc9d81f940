"""`python -m launcher` and `torchrun -m launcher`."""

import sys

from launcher.cli import main

if __name__ == "__main__":
    sys.exit(main())
