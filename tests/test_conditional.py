"""DFlash 2 and DSpark: candidates score as their heads say, and trees are built on those scores."""

import time
from collections.abc import Sequence
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
from drafter_fixtures import PACKAGINGS, Fixture
from drafter_reference import reference_block
from tiny import fixed_costs, outputs_of, requests, tiny_engine, tiny_target
from transition_reference import log_probs, louder

from bastion_batch.core.acceptance import OFF_PATH_PRIOR, AcceptanceModel
from bastion_batch.core.rounds import Frontier
from bastion_batch.core.tree import best_first
from bastion_batch.engine.candidates import Ranking, Search
from bastion_batch.engine.drafters import ConditionalScores, DraftRow, Marginals
from bastion_batch.engine.drafters.description import BlockConvolutions
from bastion_batch.engine.drafters.dflash import DFlashDrafter
from bastion_batch.engine.drafters.dflash2 import BlockConvolution
from bastion_batch.engine.drafters.fakes import RandomDrafter
from bastion_batch.engine.drafters.loading import drafter_of_tensors, load_drafter
from bastion_batch.engine.limits import allowed
from bastion_batch.engine.proposer import Proposer
from bastion_batch.engine.row import Row
from bastion_batch.engine.transfer import packed, to_host, unpacked
from bastion_batch.records import Request, SamplingParams


def _late_rnn() -> Fixture:
    """A recurrent head in a block whose first slot predicts nothing but moves the state."""
    fixture = PACKAGINGS["speculators dspark, old"]()
    fixture.config["markov_head_type"] = "rnn"
    fixture.meaning.markov = ("rnn", 5)
    return fixture


CONDITIONAL = {
    name: PACKAGINGS[name]
    for name in (
        "DFlash 2",
        "speculators dflash2",
        "speculators dspark",
        "speculators dspark, old",
        "DeepSpec DSpark",
        "SpecForge dspark",
        "Nemotron",
    )
} | {"recurrent, predicting from slot 1": _late_rnn}


class Drafting:
    """A drafter whose rows have random taps, and what the reference says of them."""

    CONTEXTS = (9, 40, 2)

    def __init__(self, fixture: Fixture, path) -> None:
        self.meaning = fixture.meaning
        self.tensors = louder(fixture.tensors())
        fixture.tensors = lambda seed=0: self.tensors  # type: ignore[method-assign]
        self.target = tiny_target("qwen3")
        self.drafter = load_drafter(fixture.write(path), self.target)
        generator = torch.Generator().manual_seed(1)
        width = 48 * len(self.meaning.taps)
        self.features = [
            torch.randn(count, width, generator=generator, dtype=torch.float64)
            for count in self.CONTEXTS
        ]
        with torch.inference_mode():
            for key, features in enumerate(self.features):
                self.drafter.observe([key], [len(features)], features)
        self._blocks: dict[int, Any] = {}

    def rows(self, keys: Sequence[int], depths: Sequence[int] | None = None) -> list[DraftRow]:
        depths = depths or [self.drafter.depth] * len(keys)
        return [
            DraftRow(key, [1] * len(self.features[key]) + [self.root(key)], depth)
            for key, depth in zip(keys, depths, strict=True)
        ]

    def root(self, key: int) -> int:
        return 7 * key + 20

    def draft(self, keys: Sequence[int], depths: Sequence[int] | None = None) -> Marginals:
        with torch.inference_mode():
            return self.drafter.draft(self.rows(keys, depths))

    def log_probs(self, key: int, path: list[int]) -> dict[int, float]:
        """By the reference, of every candidate after a path."""
        if key not in self._blocks:
            self._blocks[key] = reference_block(
                self.tensors,
                self.meaning,
                self.features[key],
                self.root(key),
                embedding=self.target.embedding,
                head=self.target.head_weight,
            )
        hidden, logits = self._blocks[key]
        return log_probs(self.tensors, self.meaning, hidden, logits, path, self.root(key))


@pytest.fixture(scope="module", params=CONDITIONAL)
def drafting(request, tmp_path_factory):
    return Drafting(CONDITIONAL[request.param](), tmp_path_factory.mktemp("drafter"))


def frontier_of(depth: int, rows, columns, askers) -> Frontier:
    ints = [np.array(values, np.int32) for values in (rows, columns, askers)]
    return Frontier(depth, *ints, np.ones(len(rows), np.bool_))


# The heads against the reference


@pytest.mark.parametrize("depths", [None, [2, 1, 3]], ids=str)
def test_candidates_score_as_the_reference_says_after_any_path(drafting, depths):
    """Three rounds over rows in any order, two children of every parent, some rows dropping out."""
    keys, random = [2, 0, 1], np.random.default_rng(0)
    marginals = drafting.draft(keys, depths)
    depths = depths or [drafting.drafter.depth] * 3
    paths: list[tuple[int, list[int]]] = [(row, []) for row in (2, 0, 1)]
    columns, askers = [0, 0, 0], [0, 0, 0]
    for depth in (1, 2, 3):
        frontier = frontier_of(depth, [row for row, _ in paths], columns, askers)
        with torch.inference_mode():
            found = drafting.drafter.log_probs_after(frontier)
        ids_RK = marginals.token_ids_RDK[:, depth - 1]
        for (row, path), values in zip(paths, found.tolist(), strict=True):
            expected = drafting.log_probs(keys[row], path)
            assert dict(zip(ids_RK[row].tolist(), values, strict=True)) == pytest.approx(
                expected, abs=5e-4
            )
            assert max(values) <= 0
        picked = [
            (asker, row, int(random.integers(0, 5)))
            for asker, (row, _) in enumerate(paths)
            if depths[row] > depth
            for _ in range(2)
        ]
        random.shuffle(picked)
        columns, askers = [column for *_, column in picked], [asker for asker, *_ in picked]
        paths = [(row, [*paths[asker][1], int(ids_RK[row, c])]) for asker, row, c in picked]


def test_scores_depend_on_the_parent(drafting):
    """So that a head that is left out would show in the tests above."""
    marginals = drafting.draft([0])
    with torch.inference_mode():
        drafting.drafter.log_probs_after(frontier_of(1, [0], [0], [0]))
        found = drafting.drafter.log_probs_after(frontier_of(2, [0] * 5, range(5), [0] * 5))
    differences = np.abs(found - found[0]).max(-1)
    assert (differences[1:] > 0.01).all()
    assert differences.max() > 0.3
    assert (np.abs(found - marginals.log_probs_RDK[0, 1]).max(-1) > 0.01).all()


def test_a_draft_of_nothing_is_harmless(drafting):
    assert (drafting.draft([1, 2], [0, 0]).log_probs_RDK == -np.inf).all()


@pytest.mark.parametrize(("name", "low", "high"), [("DFlash 2", 1, 1), ("Nemotron", 0.2, 0.999)])
def test_normalisers_are_as_stated(name, low, high, tmp_path):
    """A selector's candidates have all the probability, a Markov head's leave others their part."""
    drafting = Drafting(CONDITIONAL[name](), tmp_path)
    drafting.draft([0])
    for frontier in (frontier_of(1, [0], [0], [0]), frontier_of(2, [0] * 7, range(7), [0] * 7)):
        mass = np.exp(drafting.drafter.log_probs_after(frontier)).sum(-1)
        assert (mass > low - 1e-5).all()
        assert (mass < high + 1e-5).all()


@pytest.mark.parametrize(("num_taps", "width"), [(1, 4), (3, 5), (4, 2)])
def test_convolutions_are_causal_sums_over_a_block(num_taps, width):
    generator = torch.Generator().manual_seed(0)
    x, base, weight = (
        torch.randn(shape, generator=generator, dtype=torch.float64)
        for shape in ((3 * width, 12), (2, num_taps, 12), (2 * num_taps * 3, 12))
    )
    convolution = BlockConvolution(BlockConvolutions(num_taps=num_taps, group_size=4), base, weight)
    dynamic = (x @ weight.T).view(-1, 2, num_taps, 3).repeat_interleave(4, -1)
    expected = torch.zeros(2, *x.shape, dtype=torch.float64)
    for side, slot, tap in product((0, 1), range(3 * width), range(num_taps)):
        if slot % width >= tap:
            expected[side, slot] += (base[side, tap] + dynamic[slot, side, tap]) * x[slot - tap]
    convolved = convolution.before(x, width)
    torch.testing.assert_close(convolved.input_SE, expected[0])
    torch.testing.assert_close(convolution.after(x, convolved, width), expected[1])


# Trees


def every_path(drafting: Drafting, key: int, max_depth: int) -> dict[tuple[int, ...], float]:
    """The score of every path of tokens, by the reference."""
    scores: dict[tuple[int, ...], float] = {}
    paths: list[tuple[int, ...]] = [()]
    for _ in range(max_depth):
        longer = []
        for path in paths:
            before = scores.get(path, 0.0)
            for token, value in drafting.log_probs(key, list(path)).items():
                scores[(*path, token)] = before + value
                longer.append((*path, token))
        paths = longer
    return scores


def token_paths(candidates, ids_RDK) -> list[tuple[int, tuple[int, ...]]]:
    paths: list[tuple[int, ...]] = []
    for row, parent, depth, column in zip(*candidates[:3], candidates.columns_N, strict=True):
        token = int(ids_RDK[row, depth - 1, column])
        paths.append((*(paths[parent] if parent >= 0 else ()), token))
    return list(zip(candidates.rows_N.tolist(), paths, strict=True))


def search(drafting: Drafting, how: Search, keys, depths, ranking=None):
    marginals = drafting.draft(keys, depths)
    rows = [row_of(key) for key in keys]
    possible = allowed(marginals, rows, frozenset(), keep_places=True)
    with torch.inference_mode():
        found = how.asking(drafting.drafter, possible, np.array(depths), ranking)
    return found, marginals


def row_of(key: int, **sampling: Any) -> Row:
    params = SamplingParams(max_new_tokens=500, **sampling)
    return Row(Request(row_id=str(key), prompt_ids=(2,), sampling=params), key, frozenset(), None)


@pytest.mark.parametrize("name", ["DFlash 2", "DeepSpec DSpark"])
def test_trees_are_the_best_by_the_references_scores(name, tmp_path):
    """The batch's best paths of all there are, two levels deep, one row to one level."""
    drafting = Drafting(CONDITIONAL[name](), tmp_path)
    keys, depths = [1, 0, 2], [2, 1, 2]
    found, marginals = search(drafting, Search(60, None, None), keys, depths)
    every = {
        (place, path): score
        for place, (key, depth) in enumerate(zip(keys, depths, strict=True))
        for path, score in every_path(drafting, key, depth).items()
    }
    paths = token_paths(found, marginals.token_ids_RDK)
    assert len(set(paths)) == 60
    np.testing.assert_allclose(found.log_scores_N, [every[path] for path in paths], atol=1e-3)
    best = sorted(every.values(), reverse=True)[:60]
    np.testing.assert_allclose(found.log_scores_N, best, atol=1e-3)
    assert len({row for row, _ in paths}) == 3


def test_a_chain_takes_the_best_candidate_after_the_one_before(drafting):
    keys, depths = [0, 2], [drafting.drafter.depth] * 2
    found, marginals = search(drafting, Search(None, drafting.drafter.depth, 1), keys, depths)
    paths = dict(token_paths(found, marginals.token_ids_RDK))
    for place, key in enumerate(keys):
        expected: list[int] = []
        while len(expected) < drafting.drafter.depth:
            scores = drafting.log_probs(key, expected)
            expected.append(max(scores, key=scores.__getitem__))
        assert list(paths[place]) == expected
    assert set(found.ranks_N) == {0}


def test_candidates_are_ranked_by_how_probably_they_are_accepted(drafting):
    """Off the top-1 path the prior is about half of what the drafter says, on it all of it."""
    keys, depths = [0, 1, 2], [drafting.drafter.depth] * 3
    ranking = Ranking(AcceptanceModel(drafting.drafter.depth), np.zeros(3, np.intp))
    found, _ = search(drafting, Search(80, None, None), keys, depths, ranking)
    scores, parents = found.log_scores_N, found.parents_N
    own = scores - np.where(parents >= 0, scores[parents], 0.0)
    assert (own <= 0).all()
    assert (np.diff(scores) <= 0).all()
    on_path = np.zeros(len(found), np.bool_)
    for at, (parent, depth) in enumerate(zip(parents, found.depths_N, strict=True)):
        on_path[at] = depth == 1 or (on_path[parent] and found.ranks_N[parent] == 0)
    assert 0 < on_path.sum() < len(found)
    excess = own - found.log_probs_N
    assert (np.abs(excess[on_path]) < 0.3).all(), "but for the interpolation between knots"
    assert (np.abs(excess[~on_path] - np.log(OFF_PATH_PRIOR)) < 0.3).all()


# The proposer


class Counting:
    """Passes on to a drafter and counts the rounds of its steps, which take their time."""

    def __init__(self, drafter, seconds: float = 0.0) -> None:
        self._drafter, self._seconds = drafter, seconds
        self.rounds: list[int] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._drafter, name)

    def draft(self, rows: Sequence[DraftRow]) -> Marginals:
        self.rounds.append(0)
        return self._drafter.draft(rows)

    def log_probs_after(self, frontier: Frontier):
        time.sleep(self._seconds)
        self.rounds[-1] += 1
        assert frontier.depth == self.rounds[-1]
        return self._drafter.log_probs_after(frontier)


class Wavering(RandomDrafter):
    """Random marginals, and other random scores after every parent."""

    def draft(self, rows: Sequence[DraftRow]) -> Marginals:
        self._marginals = super().draft(rows)
        return self._marginals

    def log_probs_after(self, frontier: Frontier):
        shape = (len(frontier.rows_N), self._marginals.log_probs_RDK.shape[-1])
        return np.log(self._generator.dirichlet(np.ones(shape[1]), shape[0]))


def proposer_of(drafter, method, **options) -> Proposer:
    return Proposer(
        drafter,
        method,
        options.pop("costs", None) or fixed_costs(tiny_target("llama")),
        end_ids=frozenset({1}),
        vocab_size=97,
        max_context=512,
        nodes_per_row=12,
        max_nodes=64,
        **options,
    )


@pytest.mark.parametrize("method", ["dflash", "ddtree", "bastion"])
def test_a_step_has_at_most_one_round_per_depth(method):
    drafter = Counting(Wavering(97, 5, 8))
    proposer = proposer_of(drafter, method)
    rows = [row_of(key) for key in range(3)]
    for _ in range(6):
        forest = proposer.grow(rows, proposer.draft(rows))
        assert forest.num_nodes > 3
    assert 1 <= max(drafter.rounds) <= 5


def test_rounds_are_part_of_what_drafting_takes():
    """In the costs that decide on the next steps, and in the stage that the record shows."""
    told: list[float] = []
    costs = fixed_costs(tiny_target("llama"))
    costs.observe_draft = lambda _, seconds: told.append(seconds)  # type: ignore[method-assign]
    drafter = Counting(Wavering(97, 4, 8), seconds=0.02)
    proposer = proposer_of(drafter, "ddtree", costs=costs)
    proposal = proposer.draft([row_of(0)])
    assert proposal is not None
    assert drafter.rounds == [4], "asked while it drafts"
    assert proposal.pass_seconds == told[0] >= 4 * 0.02
    proposer.grow([row_of(0)], proposal)
    assert drafter.rounds == [4], "and not again"


@pytest.mark.parametrize("method", ["dflash", "ddtree", "bastion"])
def test_what_a_row_forbids_is_never_a_node(method):
    """Banned ids, ends that come too early, what follows an end, and depths beyond the limits."""
    drafter = Wavering(12, 4, 12)
    proposer = proposer_of(drafter, method)
    rows = [
        row_of(0, banned_ids=(3, 4, 5)),
        row_of(1, min_new_tokens=2, stop_token_ids=(7,)),
        row_of(2),
        Row(
            Request(row_id="3", prompt_ids=(2,), sampling=SamplingParams(max_new_tokens=2)),
            3,
            frozenset(),
            None,
        ),
    ]
    seen: list[set[int]] = [set() for _ in rows]
    for _ in range(30):
        forest = proposer.grow(rows, proposer.draft(rows))
        for place, (tree, ids) in enumerate(zip(forest.trees, forest.token_ids, strict=True)):
            assert len(ids) == len(tree.parents)
            seen[place].update(ids[1:])
            for node, parent in enumerate(tree.parents[1:], start=1):
                assert ids[parent] not in {1, 7} or parent == 0 or place != 1
                if place == 1 and tree.depths[node] <= 2:
                    assert ids[node] not in {1, 7}
        assert max(forest.trees[3].depths) <= 1
    assert not seen[0] & {3, 4, 5}
    assert seen[0] | {3, 4, 5} >= seen[2]
    assert method == "dflash" or len(seen[2]) > 8


@pytest.mark.parametrize("method", ["dflash", "ddtree", "bastion"])
def test_plain_drafters_keep_their_own_path(method):
    """Their trees are those of one factorised search, and they are never asked."""

    class Watched(RandomDrafter):
        def draft(self, rows):
            self.last = super().draft(rows)
            return self.last

    drafter = Watched(97, 5, 8)
    assert not isinstance(drafter, ConditionalScores)
    proposer, rows = proposer_of(drafter, method), [row_of(key) for key in range(3)]
    for _ in range(3):
        proposal = proposer.draft(rows)
        assert proposal is not None
        assert proposal.candidates is None
        forest = proposer.grow(rows, proposal)
        log_probs, ids = drafter.last
        ranks = 1 if method == "dflash" else 8
        scores = None
        if method == "bastion":
            scores = proposer.acceptance.log_scores(log_probs, np.zeros(3, np.intp))
        per_row = {"dflash": 5, "ddtree": 12}.get(method)
        expected = best_first(
            log_probs[:, :, :ranks],
            np.full(3, 5),
            None if per_row else 64,
            (ids == 1)[:, :, :ranks],
            scores=scores,
            max_per_row=per_row,
        )
        for row, (tree, tokens) in enumerate(zip(forest.trees, forest.token_ids, strict=True)):
            mine = np.flatnonzero(expected.rows_N == row)[: tree.num_nodes]
            assert tree.depths[1:] == expected.depths_N[mine].tolist()
            assert tree.ranks[1:] == expected.ranks_N[mine].tolist()
            depths, columns = expected.depths_N[mine], expected.ranks_N[mine]
            assert tokens[1:] == ids[row, depths - 1, columns].tolist()


def test_only_heads_make_a_drafter_conditional(tmp_path):
    """A DSpark file without a Markov head is plain DFlash in other slots."""
    target = tiny_target("qwen3")
    for name, make in PACKAGINGS.items():
        fixture = make()
        drafter = load_drafter(fixture.write(tmp_path / name), target)
        has_head = bool(fixture.meaning.selector or fixture.meaning.markov)
        assert isinstance(drafter, ConditionalScores) == has_head
        assert (type(drafter) is DFlashDrafter) == (not has_head)


# Decoding


def drafter_for(name: str, vocab_size: int) -> DFlashDrafter:
    """A drafter of random weights, of a vocabulary so small that some of its drafts are right."""
    fixture = CONDITIONAL[name]()
    config, tensors = fixture.config, louder(fixture.file_tensors())
    layers = config.get("transformer_layer_config", config)
    layers["vocab_size"] = vocab_size
    if "draft_vocab_size" in config:
        config["draft_vocab_size"] = vocab_size
    tensors = {
        key: value[:vocab_size] if value.shape[0] == 97 else value for key, value in tensors.items()
    }
    return drafter_of_tensors(config, tensors, tiny_target("qwen3", vocab_size=vocab_size))


METHODS = ["ar", "dflash", "ddtree", "bastion"]


@pytest.fixture(scope="module")
def plain_texts():
    """The target's own, decoded row after row without a drafter."""
    texts = {}
    for temperature in (0.0, 0.8):
        wanted = requests(3, 14, vocab_size=13, temperature=temperature, ignore_eos=True)
        engine = tiny_engine("qwen3", None, 13, method="ar", max_batch=1)
        texts[temperature] = (wanted, outputs_of(engine, wanted))
    return texts


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("name", ["DFlash 2", "SpecForge dspark", "DeepSpec DSpark"])
def test_text_is_the_targets_own(name, method, batch, temperature, plain_texts):
    """Token by token in float64, with trees that were asked for and drafts that are accepted."""
    wanted, plain = plain_texts[temperature]
    drafter = Counting(drafter_for(name, 13))
    engine = tiny_engine("qwen3", drafter, 13, method=method, max_batch=batch)
    assert outputs_of(engine, wanted) == plain
    if method != "ar":
        assert max(drafter.rounds) >= 3, "the trees were asked for"
        assert max(drafter.rounds) <= drafter.depth
        assert engine.totals.num_accepted > 0


@pytest.mark.parametrize("shapes", [[(3, 5), (2,), (4, 1, 2)], [(0, 5), (0,), (0, 1, 2)]], ids=str)
def test_tensors_of_several_types_come_to_the_host_in_one_piece(shapes):
    types = (torch.float32, torch.int64, torch.float64)
    tensors = [
        torch.randn(shape).mul(9).to(kind) for shape, kind in zip(shapes, types, strict=True)
    ]
    turned = [*tensors, torch.arange(6, dtype=torch.int32).view(2, 3).T]
    for arrays in (unpacked(packed(turned), turned), to_host(*turned)):
        for array, tensor in zip(arrays, turned, strict=True):
            np.testing.assert_array_equal(array, tensor.numpy(), strict=True)
