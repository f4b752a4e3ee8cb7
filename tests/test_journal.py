"""The journal on real files: what is written comes back, and what is damaged does no harm."""

import errno
import logging

import pyarrow as pa
import pytest
from io_jobs import completion, planned, step_record

from bastion_batch.io.journal import Journal, JournalReader, remove_journal
from bastion_batch.io.journal_rows import Entry, Saved
from bastion_batch.io.layout import JOURNAL
from bastion_batch.io.store import LocalStore
from bastion_batch.records import (
    Completion,
    End,
    Outcome,
    Request,
    RowFault,
    Stretch,
)

MINE = Stretch("w0", 65537, "cpu", 3)


@pytest.fixture
def plan(tmp_path):
    return planned(tmp_path, output__unit_rows=5)


@pytest.fixture
def store(tmp_path, plan):
    return LocalStore(tmp_path / "out")


def outcome(row, sample=0, unit=0, **changes):
    done = completion(f"f00000-{row:012d}", sample, **changes)
    what = Outcome(completion=done, stretches=(MINE,), num_migrations=1)
    return Entry(unit, what.key, what)


def prefix(row, num_steps=1, unit=0, **changes):
    records = [step_record(0, method="prefill", num_committed=1)]
    records += [step_record(step) for step in range(1, num_steps + 1)]
    what = Saved(
        generated_ids=tuple(range(1 + 2 * num_steps)),
        records=tuple(records),
        num_steps=num_steps,
        stretches=(MINE._replace(num_records=1 + num_steps),),
        num_migrations=0,
    )._replace(**changes)
    return Entry(unit, (f"f00000-{row:012d}", 0), what)


def ends(row, *attempts, unit=0):
    key = (f"f00000-{row:012d}", 0)
    return Entry(unit, key, frozenset(End(f"w{a % 2}", a) for a in attempts))


def write(store, plan, *flushes, attempt=65537):
    journal = Journal(store, plan, "w0", attempt)
    for entries in flushes:
        assert journal.write(entries)
    return journal


def names(store):
    return store.names(JOURNAL)


def test_what_is_written_comes_back(store, plan):
    entries = [
        outcome(0, text="plain"),
        outcome(1, text="ünïcode \ud800"),
        prefix(2, num_steps=3),
        ends(3, 65537, 65538),
    ]
    write(store, plan, entries, [outcome(5, unit=1)])
    assert names(store) == [f"{JOURNAL}/w0-65537-0.arrow", f"{JOURNAL}/w0-65537-1.arrow"]
    found = JournalReader(store, plan).read(0)
    assert found.outcomes[entries[0].key] == entries[0].what
    assert found.outcomes[entries[1].key].completion.text == "ünïcode \ufffd"
    assert found.prefixes == {entries[2].key: entries[2].what}
    assert found.ends == {entries[3].key: entries[3].what}
    assert set(JournalReader(store, plan).read(1).outcomes) == {("f00000-000000000005", 0)}


def test_a_saved_prefix_goes_on_with_the_request_of_its_row(store, plan):
    entry = prefix(2, num_steps=3)
    request = Request(row_id=entry.key[0], prompt_ids=(9, 9))
    restored = entry.what.onto(request)
    assert restored.exported.request.prompt_ids == (9, 9)
    assert restored.num_tokens == 7
    assert Saved.of(restored) == entry.what


def test_a_failed_row_comes_back_as_it_failed(store, plan):
    done = Completion(
        row_id="f00000-000000000000",
        sample_index=0,
        output_ids=(),
        text="",
        finish_reason="error",
        fault=RowFault("poison", "3 engines of w0, w1 ended with this row"),
        num_prompt_tokens=4,
        num_steps=0,
    )
    what = Outcome(completion=done, stretches=())
    write(store, plan, [Entry(0, what.key, what)])
    assert JournalReader(store, plan).read(0).outcomes == {what.key: what}


def test_of_several_entries_of_one_sample_the_furthest_counts(store, plan):
    write(store, plan, [prefix(0, 2), prefix(1, 2), ends(0, 1)], [outcome(0), outcome(0)])
    write(store, plan, [prefix(1, 4), ends(0, 2)], [prefix(1, 3)], attempt=65538)
    found = JournalReader(store, plan).read(0)
    assert list(found.outcomes) == [outcome(0).key]
    assert {key: what.num_steps for key, what in found.prefixes.items()} == {prefix(1).key: 4}
    assert found.ends[ends(0).key] == {End("w1", 1), End("w0", 2)}


def test_tokens_without_their_step_records_are_not_used(store, plan):
    whole = prefix(0, 2)
    entries = [
        Entry(0, ("f00000-000000000001", 0), whole.what._replace(records=())),
        Entry(0, ("f00000-000000000002", 0), whole.what._replace(records=whole.what.records[1:])),
        Entry(0, ("f00000-000000000003", 0), whole.what._replace(stretches=())),
        whole,
    ]
    write(store, plan, entries)
    assert set(JournalReader(store, plan).read(0).prefixes) == {whole.key}


@pytest.mark.parametrize("keep", [0.0, 0.3, 0.7, 0.99])
def test_a_torn_object_is_passed_over(store, plan, keep, caplog):
    write(store, plan, [outcome(0)], [outcome(1)])
    torn = store.path(names(store)[0])
    content = torn.read_bytes()
    torn.write_bytes(content[: int(keep * len(content))])
    with caplog.at_level(logging.WARNING):
        found = JournalReader(store, plan).read(0)
    assert list(found.outcomes) == [outcome(1).key]
    assert "passed over" in caplog.text


def test_an_object_with_a_damaged_body_or_of_another_kind_is_passed_over(store, plan):
    write(store, plan, [outcome(0)] * 20, [outcome(1)])
    damaged = store.path(names(store)[0])
    content = bytearray(damaged.read_bytes())
    middle = len(content) // 2
    content[middle : middle + 200] = bytes(200)
    damaged.write_bytes(content)
    store.path(f"{JOURNAL}/notes.txt").write_bytes(b"hello")
    other = str(store.path(f"{JOURNAL}/other.arrow"))
    with pa.OSFile(other, "wb") as file, pa.ipc.new_file(file, pa.schema([("x", pa.int32())])):
        pass
    assert outcome(1).key in JournalReader(store, plan).read(0).outcomes


def test_what_a_unit_without_an_owner_needs_is_listed_once(store, plan):
    write(store, plan, [outcome(0)], attempt=65540)
    write(store, plan, [outcome(1)], attempt=131073)
    reader = JournalReader(store, plan)
    assert list(reader.read(0, before_attempt=131072).outcomes) == [outcome(0).key]
    write(store, plan, [outcome(2)], attempt=65541)
    assert list(reader.read(0, before_attempt=131072).outcomes) == [outcome(0).key]
    assert len(reader.read(0).outcomes) == 3


def test_another_jobs_entries_are_foreign(tmp_path, store, plan):
    other = planned(tmp_path / "other", decoding__seed=7)
    write(store, other, [outcome(0)])
    assert JournalReader(store, plan).read(0).outcomes == {}


def test_later_objects_are_found_by_the_same_reader(store, plan):
    reader = JournalReader(store, plan)
    assert reader.read(0).outcomes == {}
    write(store, plan, [outcome(0)])
    assert list(reader.read(0).outcomes) == [outcome(0).key]


class FullDisk(LocalStore):
    """A store that may have no room."""

    full = True

    def put(self, name, payload):
        if self.full:
            raise OSError(errno.ENOSPC, "No space left on device")
        super().put(name, payload)


def test_a_full_disk_is_said_once_and_harms_nothing(tmp_path, plan, caplog):
    store = FullDisk(tmp_path / "out")
    journal = Journal(store, plan, "w0", 65537)
    with caplog.at_level(logging.WARNING):
        assert not journal.write([outcome(0)])
        assert not journal.write([outcome(0)])
    assert caplog.text.count("No space left") == 1
    store.full = False
    assert journal.write([outcome(0)])
    assert list(JournalReader(store, plan).read(0).outcomes) == [outcome(0).key]
    journal.retire({0})
    assert names(store) == []


def test_objects_go_when_all_their_units_are_committed(store, plan):
    journal = write(store, plan, [outcome(0), outcome(5, unit=1)], [outcome(6, unit=1)])
    journal.retire({1})
    assert names(store) == [f"{JOURNAL}/w0-65537-0.arrow"]
    journal.retire({0})
    assert names(store) == []


def test_clean_up_removes_what_is_of_no_use_whoever_wrote_it(store, plan):
    write(store, plan, [outcome(0)], [outcome(0), outcome(5, unit=1)])
    write(store, plan, [outcome(6, unit=1)], attempt=131073)
    store.path(f"{JOURNAL}/w9-1-0.arrow").write_bytes(b"torn")
    assert remove_journal(store, {0}) == 2
    assert len(names(store)) == 2
    assert remove_journal(store, {0, 1}) == 2
    assert names(store) == []


def test_nothing_to_write_makes_no_object(store, plan):
    write(store, plan, [])
    assert names(store) == []
