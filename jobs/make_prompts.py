"""Write prompts made from templates: what the built-in drafter was trained on and measured by.

python jobs/make_prompts.py training 8000 prompts.jsonl
python jobs/make_prompts.py held_out 64 held-out.jsonl

The same seed (a fourth argument, 1 if left out) gives the same prompts.
"""

import json
import sys
from itertools import islice
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from bastion_batch.training.prompts import Grammar

if __name__ == "__main__":
    grammar, count, path, *seed = sys.argv[1:]
    prompts = islice(Grammar.built_in(grammar).prompts(int(*seed or [1])), int(count))
    lines = (json.dumps(prompt._asdict(), ensure_ascii=False) for prompt in prompts)
    Path(path).write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
