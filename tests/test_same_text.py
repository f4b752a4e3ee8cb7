"""The same text, whoever decodes it: one worker, four unequal ones, moved about, resumed.

In float64 without exception. In float32 a row may differ where the two best tokens, noise
included, were closer than `MARGIN` at the first difference; that is looked up, and at most one may.
"""

import json
from pathlib import Path
from random import Random

import pyarrow.parquet as pq
import pytest
import torch
from balances import MovingBalance
from local_cluster import LocalCluster
from tiny import tiny_engine

from bastion_batch import run
from bastion_batch.cluster.engines import PretrainedEngines, TargetFiles
from bastion_batch.config import PoolConfig, parse_job
from bastion_batch.core.noise import position_key, row_key
from bastion_batch.engine.noise import gumbel_noise
from bastion_batch.io.results import load_steps, prove_complete

MARGIN = 1e-4
NUM_ALLOWED = 1
PROMPTS = Path(__file__).parent.parent / "jobs" / "data" / "prompts.jsonl"
SMOL = "smollm2-135m-instruct"


def make_job(directory, count, max_new_tokens, temperature, **sections):
    directory.mkdir(parents=True, exist_ok=True)
    lines = PROMPTS.read_text(encoding="utf-8").splitlines()
    path = directory.parent / "prompts.jsonl"
    path.write_text("".join(f"{lines[i % len(lines)]}\n" for i in range(count)))
    tree = {
        "input": {"path": str(path), "prompt": "prompt"},
        "output": {"path": str(directory), "unit_rows": 6, "output_token_ids": True},
        "decoding": {"max_new_tokens": max_new_tokens, "temperature": temperature, "seed": 3},
    }
    return parse_job(tree | sections)


def rows_of(job):
    """Output ids by row, after the job's books were checked."""
    rows = pq.read_table(f"{job.output.path}/data").to_pylist()
    steps = load_steps(job.output.path).group_by("row_id").aggregate([("num_committed", "sum")])
    tokens = {row["row_id"]: row["num_committed_sum"] for row in steps.to_pylist()}
    assert {row["row_id"]: row["num_output_tokens"] for row in rows} == tokens
    return {row["row_id"]: row for row in rows}


class Shuffled:
    """A local cluster whose rows are moved at random steps."""

    def __init__(self, job, engines, workers, *, invocation=1, seed=0):
        self.random = Random(seed)
        self.cluster = LocalCluster(
            job, invocation=invocation, engines=engines, balance=MovingBalance
        )
        for number, options in enumerate(workers):
            self.cluster.start(f"w{number}", **options)

    def turn(self):
        self.cluster.turn()
        self.cluster.clock.now += 0.3  # a report every few turns
        if self.random.random() < 0.5 and self.cluster.workers:
            worker = self.random.choice(list(self.cluster.workers.values()))
            rows = [row for row in worker._exchange.in_flight() if row.live]
            if rows:
                self.cluster.move(self.random.choice(rows), self.random.choice(self.attempts))

    @property
    def attempts(self):
        return list(self.cluster.workers)

    def run(self, num_turns=100_000):
        for _ in range(num_turns):
            if not self.cluster.workers:
                return
            self.turn()
        self.cluster.coordinator.drain()
        self.cluster.run()


def in_every_way(directory, make, engines, unequal, num_turns):
    """Rows of one worker, of four unequal ones with moves, and of a job resumed three times."""
    alone, many, resumed = (make(directory / name) for name in ("alone", "many", "resumed"))
    Shuffled(alone, engines, unequal(alone)[:1]).run()
    Shuffled(many, engines, unequal(many), seed=1).run()
    for invocation in (1, 2, 3):
        workers = unequal(resumed)[invocation - 1 : invocation + 1]
        Shuffled(resumed, engines, workers, invocation=invocation, seed=invocation).run(num_turns)
    last = Shuffled(resumed, engines, unequal(resumed), invocation=4, seed=4)
    last.run()
    prove_complete(resumed.output.path, last.cluster.plan)
    return rows_of(alone), rows_of(many), rows_of(resumed)


# In float64, of a tiny model


class LetterTokens:
    """A token for each byte, among 95."""

    chat_template = None

    def __call__(self, text, *, add_special_tokens=True):
        return {"input_ids": [2 + byte % 95 for byte in text.encode()][:60]}

    def decode(self, ids, **_):
        return " ".join(map(str, ids))


class TinyEngines:
    """Engines of one tiny model."""

    def __init__(self, **options):
        self.options = options

    def check(self, job):
        return TargetFiles("tiny", Path(), "tiny-1")

    def load_tokenizer(self, target):
        return LetterTokens()

    def auto_dtype(self, device):
        return "float64"

    def build(self, job, device, share):
        return tiny_engine("llama", tokenizer=LetterTokens(), **self.options)


UNEQUAL = (
    {"max_batch": 3, "method": "ar"},
    {"max_batch": 8, "method": "ar"},
    {"max_batch": 2, "drafter": "dflash", "method": "bastion"},
    {"max_batch": 5, "drafter": "dflash", "method": "ddtree", "nodes_per_row": 5},
)


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_a_tiny_models_text_depends_on_nothing_but_the_row(tmp_path, temperature):
    def make(path):
        decoding = {
            "max_new_tokens": 24,
            "temperature": temperature,
            "seed": 3,
            "ignore_eos": True,
        }
        return make_job(path, 20, 24, temperature, model={"target": "tiny"}, decoding=decoding)

    def unequal(job):
        return [{"engines": TinyEngines(**options)} for options in UNEQUAL]

    alone, many, resumed = in_every_way(tmp_path, make, TinyEngines(**UNEQUAL[0]), unequal, 25)
    for other in (many, resumed):
        assert {n: r["output_token_ids"] for n, r in other.items()} == {
            n: r["output_token_ids"] for n, r in alone.items()
        }
        assert sum(row["migrations"] for row in other.values()) >= 5
    assert len({row["worker"] for row in many.values()}) == 4
    assert not any(row["migrations"] for row in alone.values())


# In float32, of a language model


class Decisions:
    """How close the decisions of a model were, in float64."""

    def __init__(self, temperature):
        from transformers import AutoModelForCausalLM

        from bastion_batch.engine.checkpoints import load_tokenizer, resolve_target

        files = resolve_target(SMOL)
        self.tokenizer = load_tokenizer(files.path)
        self.module = AutoModelForCausalLM.from_pretrained(files.path, dtype=torch.float64).eval()
        self.temperature = temperature

    def margin(self, row, other):
        """Best score less the second where the two outputs part, noise included."""
        prompt = self.tokenizer.apply_chat_template(
            [{"role": "user", "content": row["prompt"]}], add_generation_prompt=True
        )
        prompt = prompt if isinstance(prompt, list) else prompt["input_ids"]
        pairs = zip(row["output_token_ids"], other["output_token_ids"], strict=False)
        common = next(i for i, (one, two) in enumerate(pairs) if one != two)
        ids = [*prompt, *row["output_token_ids"][:common]]
        with torch.no_grad():
            scores = self.module(torch.tensor([ids])).logits[0, -1]
        if self.temperature:
            key = position_key(row_key(3, row["row_id"], 0), len(ids))
            noise = gumbel_noise([key], len(scores), torch.device("cpu"))[0]
            scores = scores / self.temperature + noise.double()
        best = scores.topk(2).values
        return float(best[0] - best[1])


def require_same(alone, other, temperature):
    different = [n for n in alone if alone[n]["output_token_ids"] != other[n]["output_token_ids"]]
    assert len(different) <= NUM_ALLOWED, different
    if different:
        decisions = Decisions(temperature)
        for name in different:
            assert decisions.margin(alone[name], other[name]) < MARGIN, name


POOLS = (
    {"name": "a", "count": 1, "max_batch": 12, "threads": 1},
    {"name": "b", "count": 1, "max_batch": 3, "threads": 1},
    {"name": "c", "count": 1, "max_batch": 7, "threads": 2},
    {"name": "d", "count": 1, "max_batch": 1, "threads": 1},
)


def make_smol(path, temperature, **sections):
    model = {"target": SMOL, "dtype": "float32", "probe": "off"}
    return make_job(path, 48, 64, temperature, model=model, **sections)


@pytest.mark.slow
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_a_language_models_text_depends_on_nothing_but_the_row(tmp_path, temperature):
    def unequal(job):
        return [{"job": job.with_pool(PoolConfig(**pool))} for pool in POOLS]

    alone, many, resumed = in_every_way(
        tmp_path, lambda path: make_smol(path, temperature), PretrainedEngines(), unequal, 40
    )
    for other in (many, resumed):
        require_same(alone, other, temperature)
        assert sum(row["migrations"] for row in other.values()) >= 10


@pytest.mark.slow
@pytest.mark.ray
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_four_unequal_workers_of_a_ray_cluster_give_the_text_of_one(tmp_path, temperature):
    found = []
    for name, pools in (("alone", POOLS[:1]), ("many", POOLS)):
        job = make_smol(tmp_path / name, temperature, workers={"pools": list(pools)})
        run(job)
        found.append(rows_of(job))
        record = json.loads((tmp_path / name / "run.json").read_text())
        assert len(record["invocations"]) == 1
    require_same(*found, temperature)
    assert len({row["worker"] for row in found[1].values()}) > 1
