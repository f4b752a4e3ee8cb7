"""The commands on an output in an object store, as far as moto's server is S3."""

import json

import pyarrow.parquet as pq
import pytest
from io_jobs import Target, completion, make_job, read, run_unit, write_jsonl
from object_servers import Breakage, Unreliable, serving

from bastion_batch.cli import main
from bastion_batch.io.commit import commit_unit, data_name, read_footer
from bastion_batch.io.object_store import ObjectStore
from bastion_batch.io.planning import open_plan
from bastion_batch.io.results import read_totals
from bastion_batch.io.retries import Retries
from bastion_batch.io.retry import choose
from bastion_batch.io.sinks import UnitBuilder
from bastion_batch.records import RowFault

pytest.importorskip("s3fs")
moto_server = pytest.importorskip("moto.server")


@pytest.fixture(scope="module")
def moto():
    application = moto_server.DomainDispatcherApplication(moto_server.create_backend_app)
    server = Unreliable(application)
    with serving(server) as url:
        yield server, url


@pytest.fixture
def job(moto, tmp_path):
    """A job file that has the storage options, of eight rows in two units."""
    options = {"key": "test", "secret": "hidden", "endpoint_url": moto[1]}
    rows = write_jsonl(tmp_path / "in.jsonl", [{"prompt": f"say {i}"} for i in range(8)])
    url = f"s3://bucket/{tmp_path.name}"
    job = make_job(rows, url, output__storage_options=options, output__unit_rows=4)
    (tmp_path / "job.yaml").write_text(json.dumps(job.model_dump(mode="json")))
    store = ObjectStore(url, options, retries=Retries(sleep=lambda _: None))
    if not store._fs.exists("bucket"):
        store._fs.mkdir("bucket")
    return job, store, str(tmp_path / "job.yaml")


def fail_one(store, plan):
    """Commit unit 0 with its second row failed."""
    rows = read(plan, 0)
    builder = UnitBuilder(plan, 0, rows, worker="w1", attempt=1, device="cpu")
    for position, sample in list(builder.pending()):
        if position == 1:
            builder.add_fault(rows.row_ids[1], sample, RowFault("poison", "as told"))
        else:
            builder.add(completion(rows.row_ids[position], sample))
    commit_unit(store, plan, 0, 1, *builder.tables())


def test_commands_take_the_job_file_for_its_storage_options(job, tmp_path, capsys):
    config, store, file = job
    plan = open_plan(config, Target())
    fail_one(store, plan)
    assert main(["verify", file]) == 1
    assert "incomplete: 1 units are missing" in capsys.readouterr().out
    run_unit(store, plan, 1)
    store.put("run.json", json.dumps({"job_id": plan.job_id, "complete": False}).encode())
    for arguments in (["verify", file], ["verify", "--quick", file]):
        assert main(arguments) == 0
        assert f"{store.root}: 2 of 2 units, 8 of 8 rows" in capsys.readouterr().out
    assert main(["status", "--json", file]) == 0
    text = capsys.readouterr().out
    assert "hidden" not in text
    status = json.loads(text)
    assert (status["state"], status["num_failed"], status["driver"]) == ("complete", 1, None)
    assert main(["compact", file, str(tmp_path / "dest")]) == 0
    assert pq.read_table(tmp_path / "dest" / "data").num_rows == 8
    assert main(["compact", file, f"{store.root}-compact", "--steps"]) == 0
    assert f"{store.root}-compact" in capsys.readouterr().out
    assert main(["compact", file, f"{store.root}-compact"]) == 2
    assert "is not empty" in capsys.readouterr().err


def test_retry_failed_replaces_by_if_match_and_survives_a_lost_answer(job, moto):
    config, store, file = job
    server = moto[0]
    plan = open_plan(config, Target())
    fail_one(store, plan)
    run_unit(store, plan, 1)
    retry = choose(store, plan)
    assert list(retry.units) == [0]
    opened = retry.open(store, plan, 0)
    rows = read(plan, 0)
    builder = UnitBuilder(opened.plan, 0, rows, "w2", 9, "cpu", only=opened.again)
    builder.add(completion(rows.row_ids[1]))
    server.sent.clear()
    server.breakages.append(Breakage("PUT", data_name(0), 503, done=True))
    assert opened.replace(store, 9, *builder.tables()).won
    puts = server.matching("PUT", data_name(0))
    assert puts
    assert all(put.headers["If-Match"] == retry.units[0].version for put in puts)
    assert read_footer(store, data_name(0)).attempt == 9
    assert read_totals(store, plan).num_failed == 0
    assert retry.done(store, plan) == {0, 1}
    builder = UnitBuilder(opened.plan, 0, rows, "w3", 10, "cpu", only=opened.again)
    builder.add(completion(rows.row_ids[1]))
    late = opened.replace(store, 10, *builder.tables())
    assert (late.won, late.attempt) == (False, 9)
    assert main(["verify", file]) == 1  # there is no run.json: nothing has run here
