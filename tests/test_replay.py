"""A replay makes of a recording what the engine made of it, and knows what was possible."""

from dataclasses import replace

import numpy as np
import pytest
from tiny import outputs_of, requests, tiny_engine

from bastion_batch.bench.recording import Recording, RecordingDrafter, load, record, save
from bastion_batch.core.acceptance import AcceptanceModel
from bastion_batch.core.policies import Adaptive, Fixed, StepCurve
from bastion_batch.core.replay import RecordedText, ReplayStep, replay, summarise
from bastion_batch.engine.drafters import Marginals
from bastion_batch.engine.drafters.fakes import ScriptedDrafter
from bastion_batch.errors import InputError

VOCAB, DEPTH, RANKS = 97, 5, 6


class HazyDrafter(ScriptedDrafter):
    """Knows the coming tokens but not their ranks: the first choice is right about half the time."""

    def draft(self, rows):
        scripted = super().draft(rows)
        ids = np.zeros((len(rows), self.depth, RANKS), np.int64)
        log_probs = np.zeros(ids.shape, np.float32)
        for number, row in enumerate(rows):
            generator = np.random.default_rng([len(row.token_ids), row.token_ids[0]])
            for depth, true in enumerate(scripted.token_ids_RDK[number, :, 0]):
                others = [t for t in generator.permutation(VOCAB)[:RANKS] if t != true]
                rank = min(int(generator.geometric(0.5)) - 1, RANKS - 1)
                ids[number, depth] = [*others[:rank], true, *others[rank:]][:RANKS]
                weights = np.sort(generator.dirichlet(np.ones(RANKS)))[::-1]
                log_probs[number, depth] = np.log(weights + 1e-9)
        return Marginals(np.minimum(log_probs, 0), ids)


def hazy(wanted):
    outputs = outputs_of(tiny_engine(), wanted)
    script = {r.prompt_ids: out for r, out in zip(wanted, outputs, strict=True)}
    return HazyDrafter(script, VOCAB, DEPTH)


def recorded(wanted, batch_size) -> Recording:
    drafter = RecordingDrafter(hazy(wanted))
    engine = tiny_engine(drafter=drafter, method="ddtree", max_batch=batch_size)
    prompts = [request.prompt_ids for request in wanted]
    return record(engine, drafter, prompts, wanted[0].sampling, {"made": "here"})


def accepted_by_text(steps, num_texts):
    found = [[] for _ in range(num_texts)]
    for step in steps:
        for text, count in zip(step.texts, step.num_accepted, strict=True):
            found[text].append(count)
    return found


@pytest.mark.parametrize(
    ("method", "nodes_per_row", "policy"),
    [("ddtree", 5, Fixed(5)), ("ddtree", 23, Fixed(23)), ("dflash", 0, Fixed(None))],
)
@pytest.mark.parametrize("batch_size", [1, 3])
def test_a_fixed_policy_accepts_what_the_engine_accepts(method, nodes_per_row, policy, batch_size):
    wanted = requests(6, max_new_tokens=40)
    engine = tiny_engine(
        drafter=hazy(wanted), method=method, nodes_per_row=nodes_per_row, max_batch=batch_size
    )
    live = {c.row_id: c for c in engine.generate(wanted)}
    expected = [
        [r.num_accepted for r in live[w.row_id].records if r.method != "prefill"] for w in wanted
    ]
    recording = recorded(wanted, batch_size)
    steps = list(replay(recording.texts, policy, batch_size, recording.end_ids))
    assert accepted_by_text(steps, len(wanted)) == expected
    assert sum(map(sum, expected)) > 60, "trees that find nothing prove nothing"
    committed = sum(step.num_committed for step in steps)
    assert committed == sum(c.num_output_tokens - 1 for c in live.values())


def test_recording_leaves_the_text_alone_and_sees_every_position():
    wanted = requests(4, max_new_tokens=30, temperature=1.0)
    wanted = [replace(request, noise_key=number) for number, request in enumerate(wanted)]
    recording = recorded(wanted, 2)
    outputs = [output for output in outputs_of(tiny_engine(), wanted) if len(output) > 1]
    assert len(outputs) >= 3
    assert [tuple(text.output_ids.tolist()) for text in recording.texts] == outputs
    for text in recording.texts:
        assert text.num_positions == len(text.output_ids) - 1
        assert np.isfinite(text.log_probs_PDK[:-1, :, 0]).all()


def test_a_recording_survives_its_file(tmp_path):
    recording = recorded(requests(3, max_new_tokens=12), 3)
    save(recording, tmp_path / "r.npz")
    again = load(tmp_path / "r.npz")
    assert again[1:] == recording[1:]
    for text, other in zip(recording.texts, again.texts, strict=True):
        assert all(np.array_equal(a, b) for a, b in zip(text, other, strict=True))


@pytest.mark.parametrize("content", [None, b"", b"not an archive", b"PK\x03\x04"])
def test_a_file_that_is_no_recording_is_named(content, tmp_path):
    path = tmp_path / "r.npz"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(InputError, match=r"r\.npz is no recording"):
        load(path)


# The policies, on texts made up here


def curve(per_node: float, drafted: float = 1.2) -> StepCurve:
    nodes = np.array([1.0, 4.0, 16.0, 64.0])
    return StepCurve(nodes, drafted + per_node * nodes, 1.0)


def made_up(num_texts: int, q: float, truth: float, length: int = 300) -> list[RecordedText]:
    """Texts whose next token is the first choice, given about `q`, as often as `truth` says."""
    generator = np.random.default_rng(0)
    texts = []
    for _ in range(num_texts):
        output = generator.integers(10, 90, length + 1)
        first = q + generator.uniform(-0.08, 0.08, (length, DEPTH))
        probs = np.stack([first, (1 - first) * 0.6, (1 - first) * 0.3], -1)
        log_probs = np.log(probs).astype(np.float32)
        ids = np.broadcast_to([1, 2, 3], (length, DEPTH, 3)).copy()
        for position in range(length):
            coming = output[position + 1 : position + 1 + DEPTH]
            known = generator.random(len(coming)) < truth
            ids[position, : len(coming), 0] = np.where(known, coming, 1)
        texts.append(RecordedText(output.astype(np.int32), length + 1, log_probs, ids))
    return texts


def test_plain_decoding_is_its_own_measure():
    result = summarise(replay(made_up(3, 0.8, 0.8), Fixed(0), 2), curve(0.01), 2)
    assert result.tokens_per_step == pytest.approx(1.0)
    assert result.over_plain == pytest.approx(1.0)
    assert result.nodes_per_row_step == 0.0


def test_dear_nodes_make_the_adaptive_policy_decode_plainly():
    texts = made_up(4, 0.8, 0.8)
    dear, cheap = curve(3.0), curve(0.001)
    plain = summarise(replay(texts, Adaptive(dear), 2), dear, 2)
    wide = summarise(replay(texts, Adaptive(cheap), 2), cheap, 2)
    assert plain.nodes_per_row_step < 0.2
    assert 0.9 < plain.over_plain <= 1.001
    assert wide.nodes_per_row_step > 10
    assert wide.over_plain > 1.5


def test_a_learnt_acceptance_beats_an_overconfident_drafter():
    texts, costs = made_up(7, 0.9, 0.35), curve(0.05, drafted=1.02)
    raw = summarise(replay(texts, Adaptive(costs), 1), costs, 1)
    learnt = summarise(replay(texts, Adaptive(costs, 0, AcceptanceModel(DEPTH)), 1), costs, 1)
    assert raw.expected_over_realised > 1.5
    assert 0.9 < learnt.expected_over_realised < 1.2
    assert learnt.over_plain > 1.02 * raw.over_plain


def test_the_curve_is_interpolated_and_goes_on_beyond_its_ends():
    costs = StepCurve(np.array([4.0, 8.0, 16.0]), np.array([2.0, 3.0, 7.0]), 1.5)
    assert costs.seconds(np.array([4, 6, 16])).tolist() == [2.0, 2.5, 7.0]
    assert costs.seconds(np.array([18])).tolist() == [8.0]
    assert costs.seconds(np.array([0])).tolist() == [1.5], "never below a plain step"


def test_only_steps_of_a_full_batch_are_priced():
    full = ReplayStep((0, 1), (1, 0), 3, 4, 3.0, drafted=True)
    rest = ReplayStep((1,), (4,), 5, 4, 2.0, drafted=True)
    result = summarise([full, rest], curve(0.05), 2)
    assert result.num_row_steps == 2
    assert result.tokens_per_step == 1.5
    assert result.tokens_per_second == pytest.approx(3 / 1.4)
    assert result.expected_over_realised == 1.0
    with pytest.raises(ValueError, match="no step has 3 live rows"):
        summarise([full, rest], curve(0.05), 3)


def test_nothing_follows_a_stop_token():
    text = RecordedText(
        np.array([5, 6, 7], np.int32),
        100,
        np.log(np.full((2, 3, 1), 0.9, np.float32)),
        np.array([[[6], [7], [8]], [[7], [8], [9]]], np.int32),
    )
    assert [s.num_nodes for s in replay([text], Fixed(None), 1, end_ids={6})] == [1]
    assert [s.num_accepted for s in replay([text], Fixed(None), 1, end_ids={7})] == [(2,)]
