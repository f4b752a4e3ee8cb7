"""What `ray job submit` runs: `bastion-batch train-drafter`, with the package of the working directory.

The cluster's workers answer the prompts; the training itself is one process, this one, which takes
the GPU that it is given:

ray job submit --entrypoint-num-gpus 1 --working-dir . -- \
    python jobs/train_drafter.py --target org/model --data /shared/prompts.jsonl --out /shared/drafter

On a cluster without GPUs leave out `--entrypoint-num-gpus 1`. On one with a single GPU this process
would keep it from the workers, which would wait for it without end: answer the prompts first, with
`jobs/generate.py` and `output.output_token_ids: true`, and then submit the training with that job's
output as `--data`. `--data` and `--out` are on storage that every node sees. Submitting it again
goes on where it was stopped.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from bastion_batch.cli import main

if __name__ == "__main__":
    sys.exit(main(["train-drafter", *sys.argv[1:]]))
