"""What `ray job submit` runs: `bastion-batch run`, with the package of the working directory.

ray job submit --working-dir . -- \
    python jobs/generate.py jobs/quickstart.yaml --set output.path=$PWD/out/quickstart
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from bastion_batch.cli import main

if __name__ == "__main__":
    sys.exit(main(["run", *sys.argv[1:]]))
