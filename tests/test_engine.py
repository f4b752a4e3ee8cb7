"""The engine around its steps: stops, limits, continuous batching, books, bursts and memory."""

import gc
import itertools
import json
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np
import psutil
import pytest
import torch
from tiny import (
    SIZES,
    fixed_costs,
    outputs_of,
    requests,
    tiny_drafter,
    tiny_engine,
    tiny_module,
    tiny_target,
)
from tokenizers import Tokenizer
from tokenizers.decoders import Fuse
from tokenizers.models import WordLevel
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from bastion_batch.engine import Engine
from bastion_batch.engine.drafters import DraftRow, Marginals
from bastion_batch.engine.drafters.fakes import MuteDrafter, RandomDrafter, ScriptedDrafter
from bastion_batch.engine.sizing import ALONE_CHUNK, MIN_CHUNK, prompt_room
from bastion_batch.engine.target import Target
from bastion_batch.engine.totals import BaselineBursts, EngineTotals, StageClock
from bastion_batch.records import Completion, Request, SamplingParams, StepRecord

VOCAB, EOS = 97, 1
SMALL = 13
"""A vocabulary in which a random drafter is often right."""
METHODS = ["ar", "dflash", "ddtree", "bastion"]


@pytest.fixture(scope="module")
def tokenizer():
    """Token n is the two characters "<digit><letter>"; the end token is special."""
    pieces = {f"{n // 26}{chr(97 + n % 26)}": n for n in range(VOCAB) if n != EOS}
    backend = Tokenizer(WordLevel({**pieces, "</s>": EOS}, unk_token="0a"))
    backend.decoder = Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="</s>")


def completions_of(engine: Engine, wanted: Sequence[Request]) -> list[Completion]:
    """In the order of the requests."""
    found = {completion.row_id: completion for completion in engine.generate(wanted)}
    engine.check_integrity()
    assert not engine.has_work
    assert engine.num_running == engine.num_waiting == 0
    return [found[request.row_id] for request in wanted]


def oracle(wanted: Sequence[Request], outputs, vocab_size: int = VOCAB) -> ScriptedDrafter:
    scripts = {r.prompt_ids: out for r, out in zip(wanted, outputs, strict=True)}
    return ScriptedDrafter(scripts, vocab_size, depth=5)


def with_sampling(wanted: Sequence[Request], **changes) -> list[Request]:
    return [replace(r, sampling=replace(r.sampling, **changes)) for r in wanted]


def decode_records(completion: Completion) -> list[StepRecord]:
    return [record for record in completion.records if record.method != "prefill"]


def accepted(completion: Completion) -> list[int]:
    return [record.num_accepted for record in decode_records(completion)]


# Stop strings


def first_stop(text_of, output: Sequence[int], stop: Sequence[str]) -> tuple[int, str]:
    """Tokens until the text holds a stop string, and the text before it: slow and obvious."""
    for count in range(1, len(output) + 1):
        text = text_of(output[:count])
        found = [text.find(s) for s in stop if s in text]
        if found:
            return count, text[: min(found)]
    raise AssertionError("no stop in this output")


def stops_in(pieces: Sequence[str]) -> Iterator[tuple[str, ...]]:
    """Stop strings that are a token, half a token, straddle two or three, alone and together."""
    for place in range(1, len(pieces) - 2):
        yield (pieces[place],)
        yield (pieces[place][1] + pieces[place + 1][0],)
        yield (pieces[place] + pieces[place + 1] + pieces[place + 2][0], "not there")
    yield (pieces[9], pieces[4])


@pytest.mark.parametrize("drafted", [False, True], ids=["plain", "bursts of six"])
def test_output_ends_at_the_first_stop_string(tokenizer, drafted):
    """With an oracle of depth 5 the stops fall on every place of a step and across steps."""
    base = requests(1, 20, temperature=1.2, ignore_eos=True)[0]
    output = outputs_of(tiny_engine(), [base])[0]
    assert EOS not in output
    pieces = [tokenizer.decode([token]) for token in output]
    drafter = oracle([base], [output]) if drafted else None
    engine = tiny_engine(drafter=drafter, method="dflash", tokenizer=tokenizer, max_batch=8)
    wanted, expected = [], []
    for number, stop in enumerate(stops_in(pieces)):
        wanted.append(replace(with_sampling([base], stop=stop)[0], row_id=str(number)))
        expected.append(first_stop(tokenizer.decode, output, stop))
    places = {count for count, _ in expected}
    assert len(places) > 12
    for completion, (count, text) in zip(completions_of(engine, wanted), expected, strict=True):
        assert completion.output_ids == output[:count]
        assert completion.text == text
        assert completion.finish_reason == "stop"
        assert sum(record.num_committed for record in completion.records) == count
    assert (engine.totals.num_accepted > 0) == drafted


def test_a_stop_string_needs_a_tokenizer():
    with pytest.raises(ValueError, match=r"r000.*stop strings need a tokenizer"):
        tiny_engine().add(requests(1, stop=("x",))[0])


def test_text_without_stops_is_all_of_it_but_the_end_token(tokenizer):
    wanted = requests(6, 40, temperature=1.0)
    engine = tiny_engine(drafter="dflash", tokenizer=tokenizer)
    for completion in completions_of(engine, wanted):
        ids = list(completion.output_ids)
        assert completion.finish_reason == ("stop" if ids[-1] == EOS else "length")
        assert completion.text == tokenizer.decode(ids[:-1] if ids[-1] == EOS else ids)
        assert "</s>" not in completion.text


# End tokens and limits


@pytest.fixture(scope="module")
def endless():
    """Rows over a small vocabulary whose outputs hold an end token early, kept by ignoring it."""
    wanted = requests(24, 24, SMALL, temperature=1.0, ignore_eos=True)
    outputs = outputs_of(tiny_engine(vocab_size=SMALL), wanted)
    rows = [(r, out) for r, out in zip(wanted, outputs, strict=True) if EOS in out[2:20]]
    assert len(rows) >= 6
    return [row for row, _ in rows], [out for _, out in rows]


def test_ignored_ends_are_ordinary_tokens(endless):
    wanted, outputs = endless
    engine = tiny_engine(drafter=oracle(wanted, outputs, SMALL), vocab_size=SMALL, method="dflash")
    found = completions_of(engine, wanted)
    assert [c.output_ids for c in found] == outputs
    assert {c.finish_reason for c in found} == {"length"}
    full_steps = [record for c in found for record in decode_records(c)[:-1]]
    assert {record.num_accepted for record in full_steps} == {5}, "drafted past the end token"


@pytest.mark.parametrize("method", METHODS)
def test_output_ends_with_the_end_token(endless, method):
    """The oracle would go on: an end token is a leaf, so nothing after it is verified."""
    wanted, outputs = endless
    ended = [out[: out.index(EOS) + 1] for out in outputs]
    drafter = oracle(wanted, outputs, SMALL)
    engine = tiny_engine(drafter=drafter, vocab_size=SMALL, method=method, nodes_per_row=5)
    found = completions_of(engine, with_sampling(wanted, ignore_eos=False))
    assert [c.output_ids for c in found] == ended
    assert {c.finish_reason for c in found} == {"stop"}
    if method == "dflash":
        for completion in found:
            last = completion.records[-1]
            assert last.method == "prefill" or last.num_nodes <= last.num_committed


@pytest.mark.parametrize("method", METHODS)
def test_min_new_tokens_hold_the_end_back(endless, method):
    wanted, outputs = endless
    wanted = with_sampling(wanted, ignore_eos=False, min_new_tokens=12)
    plain = outputs_of(tiny_engine(vocab_size=SMALL, method="ar", max_batch=1), wanted)
    for out, unhindered in zip(plain, outputs, strict=True):
        assert len(out) >= 13 or out[-1] != EOS
        assert EOS not in out[:12]
        assert out != unhindered
    assert any(len(out) < 24 for out in plain), "some end after the minimum"
    engine = tiny_engine(drafter=oracle(wanted, plain, SMALL), vocab_size=SMALL, method=method)
    assert outputs_of(engine, wanted) == plain


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("limit", [1, 2, 3, 7])
def test_no_step_goes_beyond_max_new_tokens(method, limit):
    wanted = requests(5, limit, ignore_eos=True)
    longer = outputs_of(tiny_engine(), with_sampling(wanted, max_new_tokens=20))
    engine = tiny_engine(drafter=oracle(wanted, longer), method=method)
    for completion, output in zip(completions_of(engine, wanted), longer, strict=True):
        assert completion.output_ids == output[:limit]
        assert completion.finish_reason == "length"
        records = decode_records(completion)
        assert completion.num_steps == len(records)
        assert (completion.tokens_per_step is None) == (limit == 1)
        for record in records:
            num_done = record.context_length + 1 - completion.num_prompt_tokens
            assert record.tree_depth <= limit - num_done - 1


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("room", [1, 2, 5, 30])
def test_a_row_ends_at_the_targets_context(method, room):
    """`max_position_embeddings` is 512: prompt and output together reach it and no further."""
    ids = tuple((2 + np.arange(512 - room) * 7 % 90).tolist())
    sampling = SamplingParams(max_new_tokens=100, ignore_eos=True)
    wanted = [Request(row_id="a", prompt_ids=ids, sampling=sampling)]
    plain = outputs_of(tiny_engine("qwen3", method="ar"), wanted)
    for drafter in ("dflash", oracle(wanted, plain), RandomDrafter(VOCAB, 5, 3)):
        engine = tiny_engine("qwen3", drafter, method=method)
        (completion,) = completions_of(engine, wanted)
        assert completion.finish_reason == "length"
        assert completion.num_output_tokens == room
        assert completion.output_ids == plain[0]
        assert all(r.context_length + r.tree_depth < 511 for r in decode_records(completion))


def test_what_cannot_be_decoded_is_refused_with_its_size():
    engine = tiny_engine()
    assert engine.max_context == 512
    assert engine.check(1) is None
    assert engine.check(511) is None
    empty, long = engine.check(0), engine.check(512)
    assert empty.kind == "empty_prompt"
    assert long.kind == "prompt_too_long"
    assert "512" in long.message
    for length in (0, 512, 9000):
        with pytest.raises(ValueError, match="request far"):
            engine.add(Request(row_id="far", prompt_ids=(5,) * length))
    assert not engine.has_work


@pytest.mark.parametrize("token", [VOCAB, -1])
def test_an_unknown_token_id_is_refused_before_it_can_fail_a_batch(token):
    engine = tiny_engine()
    with pytest.raises(ValueError, match=str(token)):
        engine.add(Request(row_id="a", prompt_ids=(5, token, 6)))


# Continuous batching


@pytest.mark.parametrize("method", METHODS)
def test_rows_that_join_a_running_batch_are_answered_as_alone(method):
    wanted = requests(14, 12, temperature=0.7)
    alone = outputs_of(tiny_engine(method="ar", max_batch=1), wanted)
    engine = tiny_engine(drafter="dflash", method=method, max_batch=5)
    found, coming = {}, list(wanted)
    engine.add(coming.pop(0))
    while engine.has_work:
        for completion in engine.step():
            found[completion.row_id] = completion.output_ids
        engine.check_integrity()
        assert engine.num_running <= 5
        for _ in range(len(found) % 3):
            if coming:
                engine.add(coming.pop(0))
        if coming and not engine.has_work:
            engine.add(coming.pop(0))
    assert [found[request.row_id] for request in wanted] == alone


def test_a_step_without_work_does_nothing():
    engine = tiny_engine()
    assert engine.step() == []
    assert engine.totals == EngineTotals()


def test_unlike_rows_share_a_batch():
    """Every row by its own sampling parameters, whatever its neighbours'."""
    kinds = [
        {}, {"temperature": 1.0}, {"temperature": 0.9, "top_k": 4}, {"frequency_penalty": 0.8},
        {"temperature": 1.3, "top_p": 0.8, "ignore_eos": True}, {"min_new_tokens": 20},
    ]  # fmt: skip
    wanted = [
        replace(request, sampling=SamplingParams(max_new_tokens=18, **kinds[n % len(kinds)]))
        for n, request in enumerate(requests(12))
    ]
    alone = outputs_of(tiny_engine(method="ar", max_batch=1), wanted)
    together = tiny_engine(drafter=RandomDrafter(VOCAB, 4, 20), method="ddtree", max_batch=12)
    assert outputs_of(together, wanted) == alone


def long_requests(*lengths: int) -> list[Request]:
    return [
        Request(
            row_id=f"long{n}",
            prompt_ids=tuple((2 + np.arange(length) * (n + 3) % (SMALL - 2)).tolist()),
            sampling=SamplingParams(max_new_tokens=15, ignore_eos=True),
        )
        for n, length in enumerate(lengths)
    ]


def small_engine(**options) -> Engine:
    target = tiny_target("qwen3", SMALL)
    costs = fixed_costs(target)
    return Engine(target, tiny_drafter(target), costs=costs, **{"max_batch": 16, **options})


def test_prompts_in_several_chunks_are_one_prompt():
    """Together the prompts exceed a pass, so some enter in parts; alone each enters whole.

    Equal acceptance shows that the taps of every part reach the drafter.
    """
    wanted = long_requests(400, 300, 350, 40)
    assert sum(len(r.prompt_ids) for r in wanted) > 2 * ALONE_CHUNK
    options = {"method": "ddtree", "nodes_per_row": 30}
    alone = completions_of(small_engine(max_batch=1, **options), wanted)
    together = completions_of(small_engine(max_batch=4, **options), wanted)
    num_chunks = [sum(r.method == "prefill" for r in c.records) for c in together]
    assert max(num_chunks) > 1
    assert all(len(c.records) - c.num_steps == 1 for c in alone)
    for one, other in zip(alone, together, strict=True):
        assert one.output_ids == other.output_ids
        assert accepted(one) == accepted(other)
    assert sum(sum(accepted(c)) for c in alone) > 10


def test_prefill_records_account_for_every_prompt_token():
    engine = small_engine(method="bastion", max_batch=4)
    wanted = long_requests(400, 300, 350, 40)
    for completion in completions_of(engine, wanted):
        prefill = [r for r in completion.records if r.method == "prefill"]
        assert [r.num_committed for r in prefill] == [0] * (len(prefill) - 1) + [1]
        assert prefill[0].context_length == 0
        assert completion.records[len(prefill)].context_length == completion.num_prompt_tokens
    assert engine.totals.num_prefill_tokens == sum(len(r.prompt_ids) for r in wanted)


def test_prompts_leave_room_beside_rows_that_decode():
    """A long prompt joins in parts that the pass can take, and enters whole when alone."""
    short, long = long_requests(20, 450)
    engine = small_engine(method="ar")
    engine.add(replace(short, sampling=replace(short.sampling, max_new_tokens=60)))
    for _ in range(3):
        engine.step()
    engine.add(long)
    found = {}
    while engine.has_work:
        found |= {completion.row_id: completion for completion in engine.step()}
    chunks = [r.timing for r in found["long1"].records if r.method == "prefill"]
    assert sum(timing.prefill_tokens for timing in chunks) == 450
    room = prompt_room(engine._costs, 1, 1, 60)
    assert MIN_CHUNK <= room < 450
    assert max(timing.prefill_tokens for timing in chunks) == room
    (alone,) = completions_of(engine, [long])
    assert alone.records[0].timing.prefill_tokens == 450


# Methods compared fairly


@pytest.mark.parametrize("method", ["dflash", "ddtree"])
def test_a_rows_acceptance_does_not_depend_on_its_batch(method):
    wanted = requests(8, 20, SMALL, ignore_eos=True)
    one, eight = (
        completions_of(small_engine(method=method, nodes_per_row=30, max_batch=size), wanted)
        for size in (1, 8)
    )
    assert [accepted(c) for c in one] == [accepted(c) for c in eight]
    assert [c.output_ids for c in one] == [c.output_ids for c in eight]
    if method == "ddtree":
        assert sum(sum(accepted(c)) for c in one) > 20


class UnequalDrafter(MuteDrafter):
    """Sure of every row but those whose prompt begins with token 2, of which it knows nothing."""

    def draft(self, rows: Sequence[DraftRow]) -> Marginals:
        log_probs = np.empty((len(rows), self.depth, 32), np.float32)
        for number, row in enumerate(rows):
            log_probs[number] = -9.0 if row.token_ids[0] == 2 else -1.0 - 0.1 * np.arange(32)
        ids = np.broadcast_to(np.arange(2, 34), log_probs.shape)
        return Marginals(log_probs, ids)


def test_ddtree_gives_every_row_its_own_nodes():
    """However sure the drafter is of the others."""
    wanted = [
        replace(request, prompt_ids=(2 if number == 3 else 5, *request.prompt_ids))
        for number, request in enumerate(requests(8, 20, ignore_eos=True))
    ]
    engine = tiny_engine(
        drafter=UnequalDrafter(depth=6), method="ddtree", nodes_per_row=16, max_batch=8
    )
    for completion in completions_of(engine, wanted):
        early = decode_records(completion)[:5]
        assert [record.num_nodes for record in early] == [16] * len(early)


def test_bastion_gives_sure_rows_the_nodes():
    wanted = [
        replace(request, prompt_ids=(2 if number == 3 else 5, *request.prompt_ids))
        for number, request in enumerate(requests(8, 20, ignore_eos=True))
    ]
    engine = tiny_engine(
        drafter=UnequalDrafter(depth=6), method="bastion", max_nodes=64, max_batch=8
    )
    found = completions_of(engine, wanted)
    nodes = [sum(r.num_nodes for r in decode_records(c)[:5]) for c in found]
    assert nodes[3] == 0
    assert min(nodes[:3] + nodes[4:]) > 0
    assert all(r.timing.budget_nodes <= 64 for c in found for r in c.records)


# The books


@pytest.mark.parametrize("method", METHODS)
def test_records_add_up(method):
    wanted = requests(20, 16, SMALL, temperature=0.6)
    engine = small_engine(method=method, nodes_per_row=20, max_batch=6)
    found = completions_of(engine, wanted)
    steps = {r.timing.step: r.timing for c in found for r in c.records}
    totals = engine.totals
    assert sorted(steps) == list(range(totals.num_steps))
    for timing in steps.values():
        stages = (
            timing.prefill_seconds + timing.draft_seconds + timing.build_seconds
            + timing.verify_seconds + timing.commit_seconds + timing.other_seconds
        )  # fmt: skip
        assert stages == pytest.approx(timing.step_seconds, rel=0.02)
        assert min(timing[4:]) >= 0
        assert timing.verify_seconds > 0 or timing.prefill_seconds > 0
        assert timing.predicted_step_seconds >= timing.predicted_verify_seconds > 0
    for completion in found:
        decoded = decode_records(completion)
        assert completion.num_steps == len(decoded)
        assert sum(r.num_committed for r in completion.records) == completion.num_output_tokens
        for record in completion.records:
            assert record.num_accepted <= record.tree_depth <= record.num_nodes
            assert record.top1_depth <= record.tree_depth
            assert record.num_nodes <= record.timing.budget_nodes
        for record in decoded:
            assert record.expected_tokens >= 1
            assert record.expected_tokens <= 1 + record.num_nodes
            assert 1 <= record.num_committed <= record.num_accepted + 1
        assert all(r.num_committed == r.num_accepted + 1 for r in decoded[:-1])
        contexts = [r.context_length for r in decoded]
        grown = completion.num_prompt_tokens + np.cumsum([0, *(r.num_committed for r in decoded)])
        assert contexts == grown[:-1].tolist()
    records = [r for c in found for r in c.records]
    assert totals.num_committed == sum(c.num_output_tokens for c in found)
    assert totals.num_row_steps == sum(c.num_steps for c in found)
    assert totals.num_decoded == totals.num_committed - len(found)
    assert totals.num_accepted == sum(r.num_accepted for r in records)
    assert totals.num_nodes == sum(t.budget_nodes for t in steps.values())
    assert totals.num_nodes == sum(r.num_nodes for r in records)
    assert totals.step_seconds == pytest.approx(sum(t.step_seconds for t in steps.values()))
    assert totals.num_prefill_tokens == sum(len(r.prompt_ids) for r in wanted)


def test_steps_account_for_the_time_that_passes():
    engine = small_engine(method="bastion", max_batch=4)
    for request in requests(30, 12, SMALL):
        engine.add(request)
    passed = 0.0
    while engine.has_work:
        start = time.perf_counter()
        engine.step()
        passed += time.perf_counter() - start
    assert engine.totals.step_seconds == pytest.approx(passed, rel=0.05)


def test_a_step_answers_for_what_came_after_the_last_one():
    clock = StageClock()
    clock.finish(prefill_share=0.0)
    start = time.perf_counter()
    while time.perf_counter() < start + 0.01:
        pass
    late = clock.late_seconds
    assert late >= 0.01
    seconds = StageClock(late).finish(prefill_share=0.0)
    assert seconds["step"] >= late
    assert seconds["other"] == pytest.approx(seconds["step"])


def test_batch_size_is_all_live_rows():
    """Rows whose prompt waits for room in a pass are live too."""
    engine = small_engine(method="ddtree", max_batch=4)
    for request in long_requests(500, 500, 500, 20, 30):
        engine.add(request)
    live, sizes = [], {}
    while engine.has_work:
        live.append(min(engine.max_batch, engine.num_running + engine.num_waiting))
        for completion in engine.step():
            sizes |= {r.timing.step: r.timing.batch_size for r in completion.records}
    assert [sizes[step] for step in range(len(live))] == live


def test_info_is_json_and_names_what_runs():
    engine = small_engine(method="ddtree", max_batch=3, names=("t", "d"))
    info = engine.info
    assert json.loads(json.dumps(info._asdict()))["max_batch"] == 3
    assert (info.target, info.drafter, info.method) == ("t", "d", "ddtree")
    assert (info.device_type, info.dtype) == ("cpu", "float64")


def test_without_a_drafter_every_method_is_plain():
    engine = tiny_engine(method="bastion")
    assert engine.method == engine.info.method == "ar"
    assert {r.method for c in engine.generate(requests(2, 5)) for r in c.records} == {
        "ar",
        "prefill",
    }


# Baseline bursts


def test_bursts_are_at_most_two_percent_of_steps():
    bursts, num_plain = BaselineBursts(enabled=True), 0
    for _ in range(20_000):
        is_burst = bursts.begin_step(4, has_prompts=False)
        num_plain += is_burst
        bursts.end_step(4, 9, 1.0, is_burst=is_burst)
    assert 300 < num_plain <= 0.02 * 20_000 + BaselineBursts.LENGTH


def test_bursts_measure_the_speedup():
    """Drafted steps commit 3 tokens a row in 1.5 s, plain ones 1 in 1 s: twice as fast."""
    bursts, totals = BaselineBursts(enabled=True), EngineTotals()
    assert totals.measured_speedup is None
    random = np.random.default_rng(0)
    for _ in range(2_000):
        rows = int(random.integers(3, 5))
        is_burst = bursts.begin_step(rows, has_prompts=False)
        tokens, seconds = (rows, 1.0) if is_burst else (3 * rows, 1.5)
        totals = totals.plus(bursts.end_step(rows, tokens, seconds, is_burst=is_burst))
    assert totals.measured_speedup == pytest.approx(2.0)


def test_no_burst_while_prompts_enter_or_when_disabled():
    for enabled, has_prompts, rows in ((True, True, 4), (False, False, 4), (True, False, 0)):
        bursts = BaselineBursts(enabled=enabled)
        for _ in range(500):
            assert not bursts.begin_step(rows, has_prompts=has_prompts)
            bursts.end_step(rows, 1, 1.0, is_burst=False)


def test_bursts_change_no_text_and_are_few():
    wanted = requests(3, 120, ignore_eos=True)
    options = {"drafter": RandomDrafter(VOCAB, 3, 6), "method": "dflash", "max_batch": 1}
    expected = outputs_of(tiny_engine(method="ar"), wanted)
    engine = tiny_engine(baseline_bursts=True, **options)
    found = completions_of(engine, wanted)
    assert [c.output_ids for c in found] == list(expected)
    plain = [r for c in found for r in c.records if r.method == "ar"]
    assert 0 < len(plain) <= 0.02 * engine.totals.num_steps + BaselineBursts.LENGTH
    assert len(plain) == engine.totals.plain_steps
    assert engine.totals.measured_speedup is not None
    assert all(r.timing.method == "ar" and r.num_nodes == 0 for r in plain)


# Long runs


def held_bytes(engine: Engine, num_steps: int) -> list[int]:
    """Cache memory after each of many steps of a batch whose rows keep changing."""
    few, held, num_finished = requests(50, 6, SMALL, temperature=1.0), [], 0
    waiting = (replace(few[n % 50], row_id=str(n), noise_key=n) for n in itertools.count())
    while engine.totals.num_steps < num_steps:
        while engine.num_waiting < 3:
            engine.add(next(waiting))
        num_finished += len(engine.step())
        held.append(engine._cache.allocated_bytes)
        if engine.totals.num_steps % 500 == 0:
            engine.check_integrity()
    assert num_finished > num_steps / 3, "slots were reused"
    return held


def one_layer_engine(**options) -> Engine:
    config = LlamaConfig(vocab_size=SMALL, **{**SIZES, "num_hidden_layers": 1})
    target = Target.of_module(LlamaForCausalLM(config).eval())
    return Engine(target, costs=fixed_costs(target), max_batch=3, **options)


def test_a_thousand_steps_hold_no_more_memory_than_the_first():
    held = held_bytes(one_layer_engine(), 1_000)
    assert max(held[100:]) <= max(held[:100])


@pytest.mark.slow
@pytest.mark.parametrize("drafted", [False, True], ids=["plain", "drafted"])
def test_ten_thousand_steps_grow_the_process_by_less_than_one_percent(drafted):
    target = tiny_target("qwen3", SMALL)
    engine = one_layer_engine()
    if drafted:
        costs = fixed_costs(target)
        engine = Engine(target, tiny_drafter(target), max_batch=3, max_nodes=32, costs=costs)
    held_bytes(engine, 1_000)
    before = resident_bytes()
    held_bytes(engine, 10_000)
    assert resident_bytes() < 1.01 * before


def resident_bytes() -> int:
    gc.collect()
    return psutil.Process().memory_info().rss


def test_a_drafter_holds_memory_for_live_rows_only():
    target = tiny_target("qwen3", SMALL)
    drafter = tiny_drafter(target)
    engine = Engine(target, drafter, method="dflash", max_batch=3, costs=fixed_costs(target))
    held_bytes(engine, 300)
    drafter._cache.check()
    assert drafter._cache.num_open <= 3
    assert drafter._cache.allocated_bytes <= 4 * 256 * drafter.cache_bytes_per_token


# Other dtypes


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_working_precisions_run_and_keep_their_books(dtype):
    target = tiny_target("qwen3", SMALL, dtype)
    engine = Engine(target, tiny_drafter(target), method="bastion", costs=fixed_costs(target))
    found = completions_of(engine, requests(8, 20, SMALL, temperature=0.8))
    assert all(0 < c.num_output_tokens <= 20 for c in found)
    assert engine.totals.num_accepted > 0
    assert engine.info.dtype == str(dtype).removeprefix("torch.")


def test_a_measured_engine_is_the_same_engine():
    """Calibrated on this device instead of with fixed costs."""
    target = tiny_target("qwen3", SMALL)
    wanted = requests(6, 16, SMALL)
    engine = Engine(target, tiny_drafter(target), max_batch=4)
    assert outputs_of(engine, wanted) == outputs_of(small_engine(method="ar"), wanted)
    calibration = engine.info.calibration
    assert 0 < calibration["verify"]["num_observed"] < engine.totals.num_steps, "not the prompts'"
    json.dumps(calibration)
    fake = Engine(target, RandomDrafter(SMALL, 3, 6), max_batch=4)
    assert outputs_of(fake, wanted) == outputs_of(small_engine(method="ar"), wanted)


def test_transformers_agrees_on_a_prompt_of_several_chunks():
    """The one long prompt that no single pass takes in; 512 is also the tiny models' context."""
    module = tiny_module("llama")
    assert module.config.max_position_embeddings == ALONE_CHUNK
    first, second = (tuple((2 + np.arange(n) * 5 % 90).tolist()) for n in (480, 450))
    sampling = SamplingParams(max_new_tokens=20)
    wanted = [
        Request(row_id=str(n), prompt_ids=ids, sampling=sampling)
        for n, ids in enumerate((first, second))
    ]
    found = completions_of(tiny_engine("llama", "dflash", max_batch=2), wanted)
    assert sum(r.method == "prefill" for r in found[1].records) > 1
    for request, completion in zip(wanted, found, strict=True):
        ids = torch.tensor([request.prompt_ids])
        with torch.no_grad():
            out = module.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                do_sample=False,
                max_new_tokens=20,
                pad_token_id=1,
            )
        assert completion.output_ids == tuple(out[0, ids.shape[1] :].tolist())
