"""Rows that share prompts, give way, move and come back: their text is as if each were alone."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import count, islice

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny import fixed_costs, outputs_of, requests, tiny_drafter, tiny_engine, tiny_target

from bastion_batch.engine import Engine
from bastion_batch.engine.cache import KVCache
from bastion_batch.engine.drafters.fakes import RandomDrafter
from bastion_batch.records import Completion, Exported, Request, SamplingParams

SMALL, EOS = 13, 1
AMPLE = 1 << 40
METHODS = ["ar", "dflash", "ddtree", "bastion"]

Key = tuple[str, int]


def small_engine(cache_bytes: int | None = None, method: str = "bastion", **options) -> Engine:
    """With a real drafter over a small vocabulary, and caches that may hold `cache_bytes`."""
    target = tiny_target("qwen3", SMALL)
    options = {"max_batch": 8, "nodes_per_row": 12, "max_nodes": 48, "method": method, **options}

    def build(memory_bytes: int) -> Engine:
        drafter = tiny_drafter(target)
        costs = fixed_costs(target)
        return Engine(target, drafter, costs=costs, memory_bytes=memory_bytes, **options)

    ample = build(AMPLE)
    if cache_bytes is None:
        return ample
    budget = ample._cache.budget
    assert budget is not None
    return build(AMPLE - budget.limit_bytes + cache_bytes)


def slot_bytes(capacity: int) -> int:
    """Memory of a row's slots in both caches."""
    target = tiny_target("qwen3", SMALL)
    caches = [target.new_cache(), *tiny_drafter(target).caches]
    return capacity * sum(cache.bytes_per_token for cache in caches)


def rows_of(*lengths: int, num_samples: int = 1, max_new_tokens: int = 24, **sampling):
    """Requests with prompts of given lengths, some samples of each."""
    params = SamplingParams(max_new_tokens=max_new_tokens, **sampling)
    generator = np.random.default_rng(5)
    prompts = [tuple(generator.integers(2, SMALL, length).tolist()) for length in lengths]
    return [
        Request(
            row_id=f"r{number}",
            sample_index=sample,
            prompt_ids=prompt,
            sampling=params,
            noise_key=1000 * number + sample,
        )
        for number, prompt in enumerate(prompts)
        for sample in range(num_samples)
    ]


def key_of(row: Request | Completion) -> Key:
    return row.row_id, row.sample_index


def alone(wanted: Sequence[Request]) -> dict[Key, tuple[int, ...]]:
    """What plain decoding gives, one row at a time and nothing shared."""
    engine = small_engine(method="ar", max_batch=1)
    return {key_of(r): next(iter(engine.generate([r]))).output_ids for r in wanted}


def drain(engine: Engine) -> dict[Key, Completion]:
    """Run to the end, the books and the integrity checked at every step."""
    found = {}
    while engine.has_work:
        for completion in engine.step():
            assert_books(completion)
            found[key_of(completion)] = completion
        engine.check_integrity()
    return found


def assert_books(completion: Completion) -> None:
    records = completion.records
    assert sum(r.num_committed for r in records) == completion.num_output_tokens
    assert completion.num_steps == sum(r.method != "prefill" for r in records)


def prefill_tokens(completion: Completion) -> int:
    """Prompt tokens that were computed for this row."""
    records = [r for r in completion.records if r.method == "prefill"]
    ends = [r.context_length for r in records[1:]] + [completion.num_prompt_tokens]
    return sum(end - r.context_length for r, end in zip(records, ends, strict=True))


def texts(found: dict[Key, Completion]) -> dict[Key, tuple[int, ...]]:
    return {key: completion.output_ids for key, completion in found.items()}


# Samples of one prompt


@pytest.mark.parametrize("method", METHODS)
def test_a_prompt_is_computed_once_for_all_its_samples(method):
    wanted = rows_of(60, 9, num_samples=4, temperature=0.9)
    engine = small_engine(method=method)
    for request in wanted:
        engine.add(request)
    found = drain(engine)
    assert texts(found) == alone(wanted)
    assert engine.totals.num_prefill_tokens == 60 + 9 + 2 * 3
    for key, completion in found.items():
        assert prefill_tokens(completion) == (completion.num_prompt_tokens if key[1] == 0 else 1)


def test_a_prompt_in_chunks_is_shared_when_it_is_whole():
    wanted = rows_of(400, 300, num_samples=3, temperature=0.9, max_new_tokens=4)
    engine = small_engine()
    for request in wanted:
        engine.add(request)
    assert texts(drain(engine)) == alone(wanted)
    assert engine.totals.num_prefill_tokens == 400 + 300 + 2 * 2


def test_samples_that_come_later_copy_from_a_live_one():
    """Also from one that has copied itself, when the first is gone."""
    wanted = rows_of(50, num_samples=5, temperature=0.9, ignore_eos=True)
    engine, coming, found = small_engine(max_batch=3), iter(wanted), {}
    engine.add(next(coming))
    for _ in range(4):
        engine.step()
    for request in coming:
        engine.add(request)
        found |= {key_of(c): c.output_ids for c in engine.step()}
    found |= texts(drain(engine))
    assert found == alone(wanted)
    assert engine.totals.num_prefill_tokens == 50 + 4


def test_a_sample_that_ends_with_its_prompt_still_serves_the_others():
    wanted = rows_of(40, num_samples=3, temperature=0.9, max_new_tokens=1)
    engine = small_engine()
    assert texts({key_of(c): c for c in engine.generate(wanted)}) == alone(wanted)
    assert engine.totals.num_prefill_tokens == 40 + 2


def test_samples_wait_for_a_first_one_that_leaves():
    """The second takes over the prefill, from the start."""
    wanted = rows_of(450, num_samples=3, temperature=0.9, max_new_tokens=6)
    blocker = replace(rows_of(300)[0], row_id="blocker")
    engine = small_engine()
    for request in (blocker, *wanted):
        engine.add(request)
    engine.step()
    assert engine.export("r0", 0).request == wanted[0]
    engine.check_integrity()
    found = texts(drain(engine))
    assert {key: out for key, out in found.items() if key[0] == "r0"} == alone(wanted[1:])


def test_equal_prompts_of_one_token_have_nothing_to_share():
    wanted = rows_of(1, num_samples=3, temperature=0.9)
    engine = small_engine()
    assert texts({key_of(c): c for c in engine.generate(wanted)}) == alone(wanted)


# Memory


@pytest.mark.parametrize(
    ("method", "temperature"), [("ar", 0.8), ("dflash", 0.0), ("ddtree", 0.8), ("bastion", 0.0)]
)
def test_rows_that_do_not_fit_wait_and_come_back(method, temperature):
    """Six rows that outgrow 256 tokens, where caches hold about three of them."""
    wanted = rows_of(
        180, 184, 188, 190, 183, 186, temperature=temperature, max_new_tokens=80, ignore_eos=True
    )
    engine = small_engine(int(3.5 * slot_bytes(512)), method=method, max_batch=6)
    for request in wanted:
        engine.add(request)
    found = drain(engine)
    assert texts(found) == alone(wanted)
    assert engine.num_requeued > 0
    assert all(completion.fault is None for completion in found.values())
    again = [r for c in found.values() for r in c.records if r.method == "prefill"]
    assert sum(r.num_committed for r in again) == len(wanted), "one first token each"


def test_caches_stay_within_their_budget():
    limit = 4 * slot_bytes(512)
    engine = small_engine(limit, max_batch=6)
    for request in rows_of(180, 184, 188, 190, 183, 186, max_new_tokens=80, ignore_eos=True):
        engine.add(request)
    budget = engine._cache.budget
    assert budget is not None
    assert budget.limit_bytes == limit
    while engine.has_work:
        engine.step()
        assert budget.held_bytes <= limit
    assert budget.held_bytes == 0


def test_the_oldest_row_is_never_the_one_to_go():
    wanted = rows_of(185, 186, 187, 188, max_new_tokens=80, ignore_eos=True)
    engine = small_engine(3 * slot_bytes(512), max_batch=4)
    for request in wanted:
        engine.add(request)
    ended = [completion.row_id for completion in drain(engine).values()]
    assert engine.num_requeued > 0
    assert ended[0] == "r0"


def test_a_row_that_never_fits_is_a_fault_with_its_sizes():
    small, large = rows_of(20, 400, max_new_tokens=5)
    engine = small_engine(int(1.5 * slot_bytes(256)))
    found = {c.row_id: c for c in engine.generate([small, large, replace(small, row_id="last")])}
    assert found["r0"].output_ids == found["last"].output_ids == alone([small])["r0", 0]
    fault = found["r1"].fault
    assert fault is not None
    assert fault.kind == "out_of_memory"
    assert "400 tokens" in fault.message
    assert str(int(1.5 * slot_bytes(256))) in fault.message
    assert found["r1"].finish_reason == "error"


def test_a_row_that_outgrows_the_memory_keeps_what_it_said():
    (wanted,) = rows_of(150, max_new_tokens=200, ignore_eos=True)
    engine = small_engine(2 * slot_bytes(256))
    (completion,) = engine.generate([wanted])
    assert completion.fault is not None
    assert completion.fault.kind == "out_of_memory"
    assert_books(completion)
    assert completion.output_ids == alone([wanted])["r0", 0][: completion.num_output_tokens]
    assert completion.num_output_tokens > 40
    assert engine.num_running == 0


def test_memory_that_does_not_hold_a_pass_is_refused():
    target = tiny_target("qwen3", SMALL)
    with pytest.raises(ValueError, match="memory of 1000 bytes does not hold the largest pass"):
        Engine(target, costs=fixed_costs(target), memory_bytes=1000)


def test_the_batch_size_is_found():
    target = tiny_target("qwen3", SMALL)
    engine = Engine(target, costs=fixed_costs(target))
    assert 1 <= engine.max_batch <= 1024
    assert engine.info.max_batch == engine.max_batch
    with pytest.raises(ValueError, match="max_batch 0 is below 1"):
        Engine(target, costs=fixed_costs(target), max_batch=0)


# Moves from engine to engine


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_a_row_is_exported_and_ends_elsewhere_with_its_books(temperature):
    wanted = rows_of(30, 12, 5, 44, temperature=temperature, ignore_eos=True)
    first, second = small_engine(), small_engine(method="ddtree", max_batch=2)
    for request in wanted:
        first.add(request)
    for _ in range(3):
        first.step()
    for request in wanted[1:]:
        exported = first.export(request.row_id, request.sample_index)
        first.check_integrity()
        assert 0 < len(exported.request.generated_ids) < 24
        assert exported.num_steps > 0
        second.add(exported)
    found = drain(second) | drain(first)
    assert texts(found) == alone(wanted)
    assert all(len({r.timing.batch_size for r in c.records}) > 1 for c in found.values())


def test_a_row_that_has_not_begun_is_exported_as_it_came():
    first, second = rows_of(20, 30)
    engine = small_engine(max_batch=1)
    engine.add(first)
    engine.add(second)
    engine.step()
    assert engine.export("r1") == Exported(second)
    assert engine.num_waiting == 0
    with pytest.raises(ValueError, match="row r1, sample 0: neither waiting nor live"):
        engine.export("r1")


def test_what_has_ended_elsewhere_is_answered_at_once():
    """By an end token, by the limit or by the target's context; nothing more is decoded."""
    (base,) = rows_of(20, max_new_tokens=6)
    ends = {
        "end": replace(base, generated_ids=(5, 6, EOS)),
        "early": replace(base, generated_ids=(5, EOS, 7)),
        "limit": replace(base, generated_ids=(5, 6, 7, 8, 9, 10)),
        "context": replace(base, prompt_ids=(5,) * 500, generated_ids=(6,) * 12),
    }
    ends["context"] = replace(ends["context"], sampling=SamplingParams(max_new_tokens=100))
    engine = small_engine(max_batch=1)
    engine.add(base)
    engine.step()
    for row_id, request in ends.items():
        engine.add(replace(request, row_id=row_id))
    found = {c.row_id: c for c in engine.step()}
    assert found.keys() == ends.keys()
    assert found["end"].output_ids == (5, 6, EOS)
    assert found["early"].output_ids == (5, EOS)
    assert found["limit"].output_ids == (5, 6, 7, 8, 9, 10)
    assert found["context"].num_output_tokens == 12
    assert [c.finish_reason for c in found.values()] == ["stop", "stop", "length", "length"]
    assert all(c.num_steps == 0 for c in found.values())


def test_an_ended_row_alone_is_answered_without_a_pass():
    (base,) = rows_of(20)
    engine = small_engine()
    engine.add(replace(base, generated_ids=(5, EOS)))
    assert engine.has_work
    (completion,) = engine.step()
    assert completion.output_ids == (5, EOS)
    assert engine.totals.num_steps == 0
    assert not engine.has_work


# Everything at once


class Cluster:
    """Two engines with little memory, between which rows wander at random."""

    def __init__(self, seed: int, wanted: Sequence[Request]) -> None:
        self.random = np.random.default_rng(seed)
        limit = float(self.random.uniform(2.6, 5.0))
        self.engines = [
            small_engine(
                int(limit * slot_bytes(512)),
                method=str(self.random.choice(METHODS)),
                max_batch=int(self.random.integers(1, 7)),
            )
            for _ in range(2)
        ]
        self.coming = list(wanted)
        self.open: set[Key] = set()
        self.found: dict[Key, Completion] = {}

    def run(self) -> None:
        while self.coming or any(engine.has_work for engine in self.engines):
            if self.coming and self.random.random() < 0.3:
                request = self.coming.pop()
                self.open.add(key_of(request))
                self.any_engine().add(request)
            if self.open and self.random.random() < 0.05:
                self.move(list(self.open)[int(self.random.integers(len(self.open)))])
            for engine in self.engines:
                for completion in engine.step():
                    assert_books(completion)
                    self.open.remove(key_of(completion))
                    self.found[key_of(completion)] = completion
                engine.check_integrity()

    def any_engine(self) -> Engine:
        return self.engines[int(self.random.integers(2))]

    def move(self, key: Key) -> None:
        for engine in self.engines:
            try:
                exported = engine.export(*key)
            except ValueError:
                continue
            self.any_engine().add(exported)
            return
        raise AssertionError(f"{key} is lost")


@pytest.fixture(scope="module", params=[0.0, 0.8], ids=["greedy", "sampled"])
def wanderers(request):
    wanted = [
        *rows_of(150, 8, 170, num_samples=2, temperature=request.param, max_new_tokens=70),
        *(
            replace(r, row_id=f"x{r.row_id}", sampling=replace(r.sampling, ignore_eos=True))
            for r in rows_of(140, 180, 3, temperature=request.param, max_new_tokens=90)
        ),
    ]
    return wanted, alone(wanted)


@settings(derandomize=True, deadline=None, max_examples=3)
@given(seed=st.integers(0, 2**32))
def test_wandering_rows_say_what_they_say_alone(wanderers, seed):
    wanted, expected = wanderers
    cluster = Cluster(seed, wanted)
    cluster.run()
    assert texts(cluster.found) == expected


def poison(cache: KVCache) -> None:
    """What no row owns becomes NaN, and what lies beyond a row's tokens becomes huge."""
    for group in cache._groups.values():
        group.entries[:, len(group.slots) * group.capacity :] = torch.nan
        for slot in group.slots:
            start = slot.first_entry
            group.entries[:, start + slot.length : start + group.capacity] = 1e30


@pytest.mark.parametrize("method", METHODS)
def test_nothing_is_read_that_a_row_does_not_own(method):
    """Slots are poisoned before every step, and reused many times."""
    wanted = [
        *rows_of(7, 150, 30, 9, 60, 170, 20, max_new_tokens=60, temperature=0.7),
        *rows_of(40, num_samples=4, max_new_tokens=30, temperature=0.7),
    ]
    wanted = [replace(r, row_id=str(number)) for number, r in enumerate(wanted)]
    expected = alone(wanted)
    engine, found = small_engine(6 * slot_bytes(512), method=method, max_batch=3), {}
    assert engine.drafter is None or engine.drafter.caches
    caches = [engine._cache, *(engine.drafter.caches if engine.drafter else ())]
    for request in wanted:
        engine.add(request)
    with torch.inference_mode():
        while engine.has_work:
            for cache in caches:
                poison(cache)
            found |= {key_of(c): c.output_ids for c in engine.step()}
            engine.check_integrity()
    assert found == expected


# A generator over any number of requests


def test_requests_are_taken_as_places_become_free():
    wanted, num_taken = requests(1, 3)[0], 0

    def endless():
        nonlocal num_taken
        for number in count():
            num_taken += 1
            yield replace(wanted, row_id=str(number), noise_key=number)

    engine = tiny_engine(method="ar", max_batch=4)
    completions = engine.generate(endless())
    for num_found, _ in enumerate(islice(completions, 300), start=1):
        assert num_taken <= num_found + 3 * engine.max_batch
    engine.add(replace(wanted, row_id="mine"))
    completions.close()
    engine.check_integrity()
    assert engine.num_running + engine.num_waiting == 1, "only what was added by hand is left"
    assert [c.row_id for c in engine.generate([])] == ["mine"]


def test_a_bad_request_ends_the_generator_when_its_turn_comes():
    good, other = requests(2, 3)
    bad = replace(other, prompt_ids=())
    engine = tiny_engine(method="ar", max_batch=1)
    completions = engine.generate([good, good, bad])
    assert next(completions).row_id == good.row_id
    with pytest.raises(ValueError, match="the prompt has no tokens"):
        list(completions)
    assert not engine.has_work


def test_a_fake_drafter_needs_no_memory():
    wanted = requests(4, 12)
    expected = outputs_of(tiny_engine(method="ar"), wanted)
    engine = tiny_engine(drafter=RandomDrafter(97, 4, 8), memory_bytes=1 << 28)
    assert outputs_of(engine, wanted) == expected
