"""A job's coordinator and workers in this process, on real files and a clock that the test moves.

Workers take turns; a message is delivered when it is sent, or not at all. A killed worker is
simply not called any more.
"""

import json

import pyarrow.parquet as pq
from balances import PlainBalance

from bastion_batch.cluster.coordinator import Coordinator
from bastion_batch.cluster.invocation import coordinator_units
from bastion_batch.cluster.links import LocalLink
from bastion_batch.cluster.scripted import ScriptedEngines, scripted_ids
from bastion_batch.cluster.worker import Worker, WorkerSpec
from bastion_batch.config import parse_job
from bastion_batch.core.noise import row_key
from bastion_batch.io.commit import committed_units
from bastion_batch.io.planning import open_plan
from bastion_batch.io.results import load_steps, prove_complete
from bastion_batch.records import Request

TURN_SECONDS = 0.05


class Clock:
    """Seconds, as the test says."""

    def __init__(self):
        self.now = 100.0

    def __call__(self):
        return self.now

    def sleep(self, seconds):
        self.now += seconds


class Post:
    """Delivers mail between workers, and keeps what a test holds back."""

    def __init__(self):
        self.workers = {}
        self.sent = []
        self.lose = lambda to, mail: False

    def __contains__(self, attempt):
        return True

    def __getitem__(self, attempt):
        def deliver(mail):
            self.sent.append((attempt, mail))
            if attempt in self.workers and not self.lose(attempt, mail):
                self.workers[attempt].deliver(mail)

        return deliver

    def of(self, kind):
        return [mail for _, mail in self.sent if isinstance(mail, kind)]


def make_job(directory, rows, **sections):
    path = directory / "prompts.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    tree = {
        "input": {"path": str(path), "prompt": "prompt"},
        "output": {"path": str(directory / "out"), "unit_rows": 5},
        "model": {"target": "scripted"},
        "decoding": {"max_new_tokens": 40, "temperature": 1.0},
    }
    for name, fields in sections.items():
        tree[name] = tree.get(name, {}) | fields
    return parse_job(tree)


def prompts(count):
    return [{"prompt": f"question {i}", "label": i} for i in range(count)]


def row_id(row):
    return f"f00000-{row:012d}"


class LocalCluster:
    """One invocation of a job."""

    def __init__(
        self,
        job,
        *,
        invocation=1,
        store=None,
        max_batch=4,
        engines=None,
        balance=PlainBalance,
        **coordinator,
    ):
        self._balance_kind = balance
        self.engines = engines
        engines = engines or ScriptedEngines()
        self.job = job
        self.clock = Clock()
        self.max_batch = max_batch
        self.plan = open_plan(job, engines.check(job))
        self.store = store
        self.coordinator = Coordinator(
            **coordinator_units(self.plan)._asdict(),
            done=committed_units(job.output.path),
            balance=self._make_balance,
            **coordinator,
        )
        self.post = Post()
        self.first_attempt = invocation * 65536 + 1
        self.names = {}

    def _make_balance(self, **units):
        self.balance = self._balance_kind(**units)
        return self.balance

    @property
    def workers(self):
        return self.post.workers

    def move(self, row, to):
        """Have a row, as a worker reports it, decoded elsewhere."""
        self.balance.force(row.unit, (row.row_id, row.sample_index), to)

    def start(self, name="w0", *, harm=None, engines=None, store=None, **spec):
        """Start a worker; returns its attempt."""
        attempt = self.first_attempt + len(self.names)
        self.names[attempt] = name
        worker = Worker(
            WorkerSpec(
                **{
                    "worker": name,
                    "attempt": attempt,
                    "job": self.job,
                    "job_id": self.plan.job_id,
                    "inputs": self.plan.inputs,
                    "steps": self.plan.steps,
                    "device": "cpu",
                    "workers_on_node": 1,
                }
                | spec
            ),
            LocalLink(self.coordinator, attempt, self.clock, self.post),
            engines or self.engines or ScriptedEngines(max_batch=self.max_batch, harm=harm or {}),
            self.clock,
            self.clock.sleep,
            store or self.store,
        )
        worker.start(worker.shared_plan())
        self.workers[attempt] = worker
        return attempt

    def turn(self, *attempts):
        """One turn of these workers, or of all that live."""
        for attempt in attempts or list(self.workers):
            worker = self.workers.get(attempt)
            if worker is not None and not worker.turn():
                worker.finish()
                worker.close()
                del self.workers[attempt]
        self.clock.now += TURN_SECONDS

    def turns(self, count, *attempts):
        for _ in range(count):
            self.turn(*attempts)

    def until(self, condition, *attempts, limit=2000):
        for _ in range(limit):
            if condition():
                return
            self.turn(*attempts)
        raise AssertionError("it did not happen")

    def kill(self, attempt, *, noticed=True):
        """End a worker at once; by default the driver notices at once too."""
        worker = self.workers.pop(attempt)
        worker.close()
        if noticed:
            self.lose(attempt)
        return worker

    def lose(self, attempt):
        done = committed_units(self.job.output.path)
        self.coordinator.worker_lost(attempt, done, self.clock.now)

    def crash(self, attempt):
        """Turn a worker until its engine ends it, as its process would; the error."""
        worker = self.workers[attempt]
        for _ in range(5000):
            try:
                worker.turn()
            except RuntimeError as error:
                worker.abort()
                self.kill(attempt)
                return error
            self.clock.now += TURN_SECONDS
        raise AssertionError("it did not end")

    def run(self):
        """Turn until every worker has ended."""
        self.until(lambda: not self.workers)

    def progress(self):
        return self.coordinator.progress(self.clock.now)

    def data(self):
        return pq.read_table(f"{self.job.output.path}/data").to_pylist()

    def check(self):
        """Every sample once, with its own text, and steps that come to its tokens."""
        prove_complete(self.job.output.path, self.plan)
        rows = self.data()
        steps = load_steps(self.job.output.path).to_pylist()
        tokens = {}
        for step in steps:
            key = step["row_id"], step["sample_index"]
            tokens[key] = tokens.get(key, 0) + step["num_committed"]
        made = [(s["row_id"], s["sample_index"], s["attempt"], s["step"]) for s in steps]
        assert len(made) == len(set(made)), "a record is there twice"
        for row in rows:
            if row["finish_reason"] == "error":
                continue
            request = Request(
                row_id=row["row_id"],
                prompt_ids=tuple(row["prompt"].encode()),
                sampling=self.job.decoding.sampling,
                noise_key=row_key(self.job.decoding.seed, row["row_id"], row["sample_index"]),
            )
            assert row["output"] == bytes(scripted_ids(request)).decode()
            assert tokens[row["row_id"], row["sample_index"]] == row["num_output_tokens"]
        return rows
