"""`python -m bastion_batch.cli`: the command line without its script."""

import sys

from bastion_batch.cli import main

if __name__ == "__main__":
    sys.exit(main())
