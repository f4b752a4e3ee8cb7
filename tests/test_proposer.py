"""When drafting pays it is done, for the rows for which it does; else it costs next to nothing."""

import time
from collections.abc import Sequence

import numpy as np
import pytest

from bastion_batch.core.acceptance import AcceptanceModel
from bastion_batch.core.roofline import PassLoad
from bastion_batch.engine.costs import DraftLoad
from bastion_batch.engine.drafters import DraftRow, Marginals
from bastion_batch.engine.drafters.fakes import MuteDrafter, RandomDrafter
from bastion_batch.engine.overheads import DraftOverheads
from bastion_batch.engine.proposer import Forest, Proposer
from bastion_batch.engine.row import Row
from bastion_batch.engine.step import Verified, Work
from bastion_batch.records import Request, SamplingParams

DEPTH = 4


class Verify:
    """Passes of up to `free_tokens` take 1 second, each token more as much again as told."""

    def __init__(self, free_tokens: int, token_seconds: float) -> None:
        self._free, self._token_seconds = free_tokens, token_seconds

    def seconds_of(self, load: PassLoad):
        return 1 + self._token_seconds * np.maximum(load.num_tokens - self._free, 0)

    hopeful_seconds_of = seconds_of


class Costs:
    """What steps cost, as if known; remembers what it was told of draft passes."""

    def __init__(self, draft_seconds=0.1, per_row=0.0, free_tokens=32, token_seconds=0.05):
        self.verify = Verify(free_tokens, token_seconds)
        self.other_seconds = 0.0
        self.told: list[float] = []
        self._draft_seconds, self._per_row = draft_seconds, per_row

    def plain_step_seconds(self, num_rows: int, context_tokens: int) -> float:
        load = PassLoad.of(np.array([num_rows]), num_rows, context_tokens)
        return float(self.verify.seconds_of(load)[0])

    def load_of_trees(self, num_tokens, longest, contexts) -> PassLoad:
        return PassLoad.padded(num_tokens, longest, contexts, call_pairs=0)

    def draft_seconds(self, load: DraftLoad) -> float:
        return self._draft_seconds + self._per_row * load.num_rows

    def observe_draft(self, load: DraftLoad, seconds: float) -> None:
        self.told.append(seconds)


class Knowing(MuteDrafter):
    """Sure of its tokens in some rows, at a loss in the others."""

    def __init__(self, sure: Sequence[int] = ()) -> None:
        super().__init__(DEPTH)
        self.sure = set(sure)

    def draft(self, rows: Sequence[DraftRow]) -> Marginals:
        shape = (len(rows), DEPTH, 2)
        best = np.array([0.8 if row.key in self.sure else 0.01 for row in rows])
        best = np.broadcast_to(best[:, None], shape[:2])
        log_probs = np.log(np.stack([best, 0.5 * (1 - best) * best], -1)).astype(np.float32)
        return Marginals(log_probs, np.broadcast_to(np.array([5, 6]), shape))


class Late(Knowing):
    """Takes its time to catch up."""

    pending = 100

    def num_pending(self, key: int) -> int:
        return self.pending

    def catch_up(self, keys: Sequence[int]) -> None:
        time.sleep(0.05)
        self.pending = 0


def row_of(key: int, num_prompt: int = 3, **sampling) -> Row:
    params = SamplingParams(max_new_tokens=500, **sampling)
    request = Request(row_id=str(key), prompt_ids=(2,) * num_prompt, sampling=params)
    return Row(request, key, frozenset({1}), None)


def proposer_of(drafter, costs=None, method="bastion", **options) -> Proposer:
    return Proposer(
        drafter,
        method,
        costs or Costs(),
        end_ids=frozenset({1}),
        vocab_size=512,
        max_context=512,
        nodes_per_row=8,
        max_nodes=64,
        **options,
    )


def step(proposer: Proposer, rows: list[Row], accept: Sequence[int] = (), chunks=()) -> Forest:
    """Draft, grow and learn: the rows named in `accept` take their whole top-1 path."""
    forest = proposer.grow(rows, proposer.draft(rows), chunks)
    proposer.learn(
        [
            Verified(work, path, [9] * (1 + len(path)), 0)
            for work in forest.works()
            for path in [work.tree.top1_path[1:] if work.row.key in accept else []]
        ]
    )
    proposer.judge(seconds_of(proposer, rows, forest))
    return forest


def seconds_of(proposer: Proposer, rows: list[Row], forest: Forest) -> float:
    """What the step takes, by the costs that the proposer was given."""
    costs, load = proposer._costs, DraftLoad(0, len(rows), 0)
    num_tokens = np.array([len(rows) + forest.num_nodes])
    seconds = float(costs.verify.seconds_of(PassLoad.of(num_tokens, len(rows), 0))[0])
    return seconds + (costs.draft_seconds(load) if forest.drafted else 0.0)


@pytest.mark.parametrize("drafter", [MuteDrafter(DEPTH), RandomDrafter(97, DEPTH, 8), Knowing()])
def test_a_useless_drafter_costs_under_two_percent(drafter):
    proposer, rows = proposer_of(drafter, Costs(draft_seconds=0.2)), [row_of(0)]
    num_drafted = sum(step(proposer, rows).drafted for _ in range(2_000))
    assert num_drafted >= 1
    assert 0.3 * num_drafted < 0.02 * 2_000


def test_a_confident_drafter_that_is_always_wrong_is_found_out():
    """Its own probabilities say that it pays; what was accepted says that it does not."""
    proposer, rows = proposer_of(Knowing(sure=[0]), Costs(draft_seconds=0.2)), [row_of(0)]
    drafted = [step(proposer, rows).drafted for _ in range(500)]
    assert sum(drafted) * 0.25 < 0.04 * 500


def test_a_good_drafter_always_runs_but_for_one_probe():
    proposer, rows = proposer_of(Knowing(sure=[0])), [row_of(0)]
    forests = [step(proposer, rows, accept=[0]) for _ in range(300)]
    plain = [number for number, forest in enumerate(forests) if not forest.drafted]
    assert plain == [8, 9], "what plain steps take is to be known"
    assert all(forest.num_nodes >= DEPTH for forest in forests if forest.drafted)


def test_hopeless_rows_are_left_out_and_get_a_bare_root():
    proposer = proposer_of(Knowing(sure=[0, 2]), Costs(draft_seconds=0.01, per_row=0.1))
    rows = [row_of(0), row_of(1), row_of(2)]
    kept, num_plain = [], 0
    for _ in range(300):
        proposal = proposer.draft(rows)
        if proposal is None:
            num_plain += 1
            proposer.grow(rows, None)
            continue
        kept.append(proposal.places)
        forest = proposer.grow(rows, proposal)
        assert [len(ids) for ids in forest.token_ids] == [len(t.parents) for t in forest.trees]
        assert forest.trees[0].num_nodes >= DEPTH
        assert forest.trees[2].num_nodes >= DEPTH, "others are as they were"
        if 1 not in proposal.places:
            assert forest.trees[1].num_nodes == 0
        proposer.learn(
            [Verified(w, w.tree.top1_path[1:] if w.row.key != 1 else [], [9], 0)
             for w in forest.works()]
        )  # fmt: skip
    assert num_plain <= 0.05 * 300, "probes"
    assert kept[0] == [0, 1, 2]
    assert kept.count([0, 2]) > 240
    assert [0, 1, 2] in kept[100:], "and looked at again"


def test_each_batch_size_decides_for_itself():
    """Draft passes that take longer with every row pay for few rows only."""
    proposer = proposer_of(Knowing(sure=[0]), Costs(draft_seconds=0.0, per_row=0.8))
    many = [row_of(key) for key in range(8)]
    assert sum(step(proposer, many, accept=[0]).drafted for _ in range(300)) < 100
    alone = [step(proposer, many[:1], accept=[0]).drafted for _ in range(20)]
    assert alone.count(False) == 2, "a probe"


def test_prompts_in_the_pass_are_priced():
    """Nodes that are free in a small pass are not where prompts have filled it."""
    rows, chunk_row = [row_of(0)], row_of(9, num_prompt=40)
    chunk = Work(chunk_row, chunk_row.token_ids[:40], None)
    costs = Costs(free_tokens=32, token_seconds=2.0)
    free = step(proposer_of(Knowing(sure=[0]), costs), rows)
    crowded = step(proposer_of(Knowing(sure=[0]), costs), rows, chunks=[chunk])
    assert free.num_nodes >= DEPTH
    assert crowded.num_nodes < free.num_nodes


def test_catching_up_is_not_learnt_as_the_passs_cost():
    costs, drafter = Costs(), Late(sure=[0])
    proposer, rows = proposer_of(drafter, costs), [row_of(0)]
    forest = step(proposer, rows)
    assert len(costs.told) == 1
    assert costs.told[0] < 0.04
    assert forest.drafting_seconds > 0.05, "but is accounted for"
    drafter.pending = 100
    late = step(proposer, rows)
    assert late.predicted_drafting_seconds == pytest.approx(0.1), "nor as what every step takes"


def test_what_drafting_takes_besides_is_predicted():
    overheads = DraftOverheads()
    assert overheads.seconds(5) == 0
    for _ in range(100):
        overheads.observe(1, 0.01)
        overheads.observe(16, 0.1)
    assert overheads.seconds(1) == pytest.approx(0.01)
    assert overheads.seconds(2) == pytest.approx(0.01), "the nearest size that was seen"
    assert overheads.seconds(31) == pytest.approx(0.1)
    for _ in range(100):
        overheads.observe(1, 0.02)
    assert overheads.seconds(1) == pytest.approx(0.02, rel=0.01)


def test_without_calibration_the_drafter_is_believed():
    rows = [row_of(0)]
    plain, learnt = (
        step(proposer_of(Knowing(sure=[0]), calibrated=calibrated), rows)
        for calibrated in (False, True)
    )
    assert plain.trees[0].expected_tokens == pytest.approx(plain.trees[0].expected_tokens_raw)
    assert learnt.trees[0].expected_tokens != pytest.approx(learnt.trees[0].expected_tokens_raw)


def test_what_was_learnt_before_is_used():
    rows = [row_of(0)]
    taught = proposer_of(Knowing(sure=[0]))
    for _ in range(64):
        step(taught, rows)
    again = AcceptanceModel.from_dict(DEPTH, taught.acceptance.to_dict())
    fresh, warm = proposer_of(Knowing(sure=[0])), proposer_of(Knowing(sure=[0]), acceptance=again)
    expected = [step(one, rows).trees[0].expected_tokens for one in (fresh, warm)]
    assert expected[1] < 0.7 * expected[0]


@pytest.mark.parametrize(("method", "num_nodes"), [("dflash", DEPTH), ("ddtree", 8)])
def test_fixed_trees_are_grown_in_every_row_whatever_it_gains(method, num_nodes):
    proposer, rows = proposer_of(Knowing(), method=method), [row_of(0), row_of(1)]
    for _ in range(50):
        forest = step(proposer, rows)
        assert [tree.num_nodes for tree in forest.trees] == [num_nodes] * 2


def test_banned_tokens_are_in_no_tree():
    rows = [row_of(0, banned_ids=(5,)), row_of(1)]
    forest = step(proposer_of(Knowing(sure=[0, 1]), method="ddtree"), rows)
    assert 5 not in forest.token_ids[0]
    assert 6 in forest.token_ids[0]
    assert 5 in forest.token_ids[1]


def test_plain_methods_never_draft():
    rows = [row_of(0)]
    assert proposer_of(Knowing(sure=[0]), method="ar").draft(rows) is None
    assert proposer_of(None).draft(rows) is None
    assert proposer_of(Knowing()).draft([]) is None
    assert not proposer_of(None).grow(rows, None).drafted
