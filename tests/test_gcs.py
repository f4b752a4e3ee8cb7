"""The requests that a store sends to Google Cloud Storage. No real one was asked."""

import os

import pytest
from io_jobs import answer, planned, run_unit
from object_servers import Breakage, TinyGcs, Unreliable, serving

from bastion_batch.io.commit import Commit, commit_unit, read_footer
from bastion_batch.io.object_store import ObjectStore
from bastion_batch.io.retries import Retries
from bastion_batch.io.store import DATA, probe_conditional

# Otherwise gcsfs asks a service of Google's what kind of bucket it is, through gRPC.
os.environ["GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT"] = "false"
pytest.importorskip("gcsfs")

NAME = f"{DATA}/u00000000.parquet"
UPLOAD = "/upload/storage/v1/b/bucket/o"


@pytest.fixture
def server():
    return Unreliable(TinyGcs())


@pytest.fixture
def store(server):
    with serving(server) as url:
        options = {"token": "anon", "endpoint_url": url}
        retries = Retries(num_tries=3, sleep=lambda seconds: None)
        yield ObjectStore("gs://bucket/out", options, retries=retries)


def test_creating_asks_that_no_generation_exists(store, server):
    assert store.put_if_absent(NAME, b"one")
    assert not store.put_if_absent(NAME, b"two")
    assert store.read(NAME) == b"one"
    for sent in server.matching("POST", UPLOAD):
        assert sent.query == {
            "uploadType": "media",
            "name": f"out/{NAME}",
            "ifGenerationMatch": "0",
        }
    assert probe_conditional(store)


def test_replacing_asks_for_the_generation_that_was_seen(store, server):
    store.put(NAME, b"one")
    seen = store.version(NAME)
    server.sent.clear()
    assert store.replace_if(NAME, b"two", seen)
    [sent] = server.matching("POST", UPLOAD)
    assert sent.query["ifGenerationMatch"] == seen
    assert not store.replace_if(NAME, b"three", seen)
    assert store.read(NAME) == b"two"
    assert store.version(NAME) != seen


def test_the_rest_of_a_store_works(store):
    store.make_directories()
    assert store.names(DATA) == []
    store.put(NAME, bytes(range(200)))
    assert store.exists(NAME)
    assert store.names(DATA) == [NAME]
    with store.open(NAME) as file:
        file.seek(100)
        assert file.read(3) == bytes([100, 101, 102])
    store.remove(NAME)
    store.remove(NAME)
    assert not store.exists(NAME)
    assert store.version(NAME) is None
    with pytest.raises(FileNotFoundError):
        store.read(NAME)


@pytest.mark.parametrize("status", [503, 429])
def test_a_lost_answer_is_not_a_lost_race(store, server, tmp_path, status):
    plan = planned(tmp_path)
    server.breakages.append(Breakage("POST", "u00000000.parquet", status, done=True))
    data, _ = answer(plan, 0, 5)
    assert commit_unit(store, plan, 0, 5, data, None) == Commit(won=True, attempt=5)
    assert run_unit(store, plan, 0, attempt=6) == Commit(won=False, attempt=5)
    assert read_footer(store, NAME).attempt == 5


def test_a_refusal_is_not_tried_again(store, server):
    server.breakages.append(Breakage("POST", UPLOAD, 403, done=False))
    with pytest.raises(PermissionError):
        store.put_if_absent(NAME, b"x")
