"""The engine's text is the target's own, for every method, tree, batch and drafter."""

import pytest
import torch
from tiny import outputs_of, requests, tiny_engine, tiny_module

from bastion_batch.engine.buckets import coarse, exact, fine
from bastion_batch.engine.drafters.fakes import MuteDrafter, RandomDrafter, ScriptedDrafter
from bastion_batch.engine.step import PassLayout
from bastion_batch.records import Request

FAMILIES = ["llama", "qwen3"]
COUNT, SHORT = 8, 5
"""Rows, and the tokens of each where many engines are tried."""

ON_A_DEVICE = PassLayout(draw_all=True, bucket=coarse)
"""What a pass does on CUDA: one wait for all nodes, and few shapes."""


def reference(family: str, wanted: list[Request]) -> list[tuple[int, ...]]:
    """What transformers' own greedy `generate` gives, one unpadded row at a time."""
    model = tiny_module(family)
    outputs = []
    for request in wanted:
        ids = torch.tensor([request.prompt_ids])
        with torch.no_grad():
            out = model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                do_sample=False,
                max_new_tokens=request.sampling.max_new_tokens,
                pad_token_id=1,
            )
        outputs.append(tuple(out[0, ids.shape[1] :].tolist()))
    return outputs


def shortened(outputs: list[tuple[int, ...]]) -> list[tuple[int, ...]]:
    return [output[:SHORT] for output in outputs]


@pytest.fixture(scope="module", params=FAMILIES)
def family(request):
    return request.param


@pytest.fixture(scope="module")
def expected(family):
    outputs = reference(family, requests(COUNT))
    assert len(set(outputs)) > 1, "the models say different things"
    return outputs


@pytest.mark.parametrize("method", ["ar", "dflash", "ddtree", "bastion"])
def test_greedy_text_equals_transformers_at_every_batch(family, expected, method):
    for max_batch in range(1, 9):
        engine = tiny_engine(family, "dflash", method=method, max_batch=max_batch)
        found = outputs_of(engine, requests(COUNT, SHORT))
        assert found == shortened(expected), f"batch {max_batch}"


@pytest.mark.parametrize("method", ["dflash", "ddtree", "bastion"])
def test_greedy_text_is_the_same_to_its_end(family, expected, method):
    engine = tiny_engine(family, "dflash", method=method, max_batch=3)
    assert outputs_of(engine, requests(COUNT)) == expected


@pytest.mark.parametrize("method", ["ddtree", "bastion"])
def test_no_budget_changes_the_text(family, expected, method):
    """Every budget from 0 to 64 nodes, of a row and of the batch, at batches from 1 to 8.

    Even budgets of one method are tried on one family and odd ones on the other.
    """
    first = ((family == "qwen3") + (method == "bastion")) % 2
    num_nodes = []
    for budget in range(first, 65, 2):
        drafter = RandomDrafter(97, depth=5, num_ranks=8, seed=budget)
        max_batch = 1 + (3 * budget + 5) % 8
        engine = tiny_engine(
            family, drafter, method=method, nodes_per_row=budget, max_nodes=budget,
            max_batch=max_batch,
        )  # fmt: skip
        found = outputs_of(engine, requests(COUNT, SHORT))
        assert found == shortened(expected), f"budget {budget}, batch {max_batch}"
        num_nodes.append(engine.totals.num_nodes)
    assert (num_nodes[0] == 0) == (first == 0)
    assert min(num_nodes[1:]) > 0
    assert num_nodes[-1] > 2 * num_nodes[1]


def test_an_oracle_is_accepted_to_full_depth(family, expected):
    wanted = requests(COUNT)
    scripts = {r.prompt_ids: out for r, out in zip(wanted, expected, strict=True)}
    engine = tiny_engine(family, ScriptedDrafter(scripts, 97, depth=5), method="dflash")
    assert outputs_of(engine, wanted) == expected
    full = [out for out in expected if len(out) == 24]
    assert engine.totals.num_decoded / engine.totals.num_row_steps > 5, "tokens per step of 6"
    assert full, "some rows run to the limit"


def test_a_drafter_that_is_always_wrong_costs_nothing_but_time(family, expected):
    wanted = requests(COUNT)
    scripts = {r.prompt_ids: out for r, out in zip(wanted, expected, strict=True)}
    drafter = ScriptedDrafter(scripts, 97, depth=5, shift=40)
    engine = tiny_engine(family, drafter, method="bastion")
    assert outputs_of(engine, wanted) == expected
    assert engine.totals.num_accepted == 0


SAMPLED = [
    {"temperature": 0.8},
    {"temperature": 1.2, "top_p": 0.9},
    {"temperature": 0.8, "top_k": 5, "min_p": 0.05, "logit_bias": ((7, 3.0), (1, 2.0))},
    {"temperature": 1.2, "repetition_penalty": 1.3, "presence_penalty": 0.4, "top_p": 0.95},
    {"temperature": 0.8, "banned_ids": tuple(range(20, 60)), "stop_token_ids": (8, 9)},
    {"temperature": 0.0, "frequency_penalty": 0.7, "min_new_tokens": 7},
    {"temperature": 0.0, "logit_bias": ((1, 4.0), (5, 4.0)), "banned_ids": (11, 70, 94)},
]
ROWS = 16


@pytest.mark.parametrize("sampling", SAMPLED, ids=str)
def test_any_tree_gives_the_same_samples(sampling):
    """An oracle, one that avoids, one that guesses, one that is mute, and a real drafter."""
    wanted = requests(ROWS, 9, **sampling)
    plain = outputs_of(tiny_engine(method="ar", max_batch=1), wanted)
    scripts = {r.prompt_ids: out for r, out in zip(wanted, plain, strict=True)}
    drafters = {
        "oracle": lambda: ScriptedDrafter(scripts, 97, depth=5),
        "avoiding": lambda: ScriptedDrafter(scripts, 97, depth=5, shift=40),
        "random": lambda: RandomDrafter(97, depth=4, num_ranks=20),
        "mute": MuteDrafter,
        "dflash": lambda: "dflash",
    }
    for name, drafter in drafters.items():
        engine = tiny_engine(drafter=drafter(), method="bastion", max_batch=16)
        assert outputs_of(engine, wanted) == plain, name
    for max_batch in (1, 16):
        oracle = tiny_engine(drafter=drafters["oracle"](), method="dflash", max_batch=max_batch)
        assert outputs_of(oracle, wanted) == plain, max_batch
        assert oracle.totals.num_accepted > 2 * oracle.totals.num_row_steps, "to full depth"
    assert outputs_of(tiny_engine(method="ar", max_batch=16), wanted) == plain


@pytest.mark.parametrize("sampling", [{}, *SAMPLED], ids=str)
def test_what_a_pass_does_on_a_device_changes_no_sample(sampling):
    wanted = requests(ROWS, 9, **sampling)
    plain = outputs_of(tiny_engine(method="ar"), wanted)
    for max_batch in (3, 16):
        engine = tiny_engine(
            drafter=RandomDrafter(97, depth=4, num_ranks=20),
            method="ddtree",
            nodes_per_row=11,
            max_batch=max_batch,
            layout=ON_A_DEVICE,
        )
        assert outputs_of(engine, wanted) == plain


def test_unlike_rows_are_drawn_together_as_apart():
    """Greedy, penalised and sampled rows in one pass, prompts among them."""
    mixed = [requests(ROWS, 9, **p)[n] for n, p in enumerate([{}, *SAMPLED] * 2)]
    plain = outputs_of(tiny_engine(method="ar", max_batch=1), mixed)
    for layout in (PassLayout(draw_all=False, bucket=exact), ON_A_DEVICE):
        drafter = RandomDrafter(97, depth=4, num_ranks=20)
        engine = tiny_engine(drafter=drafter, method="ddtree", max_batch=6, layout=layout)
        assert outputs_of(engine, mixed) == plain


def test_bans_bias_and_stops_do_what_they_say():
    wanted = requests(COUNT, temperature=1.0, ignore_eos=True)
    free = outputs_of(tiny_engine(method="ar"), wanted)
    said = {token for out in free for token in out}
    banned = tuple(sorted(said))[::2]
    held = outputs_of(
        tiny_engine(drafter="dflash"),
        requests(COUNT, temperature=1.0, ignore_eos=True, banned_ids=banned),
    )
    assert not {token for out in held for token in out} & {*banned}
    biased = requests(COUNT, temperature=1.0, ignore_eos=True, logit_bias=((13, 1e4),))
    assert outputs_of(tiny_engine(drafter="dflash"), biased) == [(13,) * 24] * COUNT
    stop = free[0][5]
    stopped = outputs_of(
        tiny_engine(drafter="dflash"),
        requests(COUNT, temperature=1.0, ignore_eos=True, stop_token_ids=(stop,)),
    )
    cuts = [out.index(stop) + 1 if stop in out else len(out) for out in free]
    assert stopped == [out[:cut] for out, cut in zip(free, cuts, strict=True)]


def test_ids_that_the_target_lacks_are_refused_when_they_are_queued():
    [request] = requests(1, banned_ids=(97,))
    with pytest.raises(ValueError, match=r"r000: banned_ids names token 97; .* has 97"):
        tiny_engine(method="ar").add(request)
    [request] = requests(1, banned_ids=tuple(range(97)))
    with pytest.raises(ValueError, match=r"r000: banned_ids .* are 97 tokens; .* one must be left"):
        tiny_engine(method="ar").add(request)


def test_buckets_are_few_and_at_most_double():
    buckets = [coarse(n) for n in range(1, 600)]
    assert sorted(set(buckets)) == [
        1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768,
    ]  # fmt: skip
    assert all(n <= bucket < 2 * n for n, bucket in enumerate(buckets, start=1))
    assert buckets == sorted(buckets)


def test_fine_buckets_add_an_eighth_at_most():
    buckets = [fine(n) for n in range(1, 600)]
    assert buckets[:16] == list(range(1, 17)), "small passes are as they are"
    assert [n for n in sorted(set(buckets)) if 16 < n <= 64] == [
        *range(18, 33, 2),
        *range(36, 65, 4),
    ]
    assert all(n <= bucket <= n * 9 / 8 for n, bucket in enumerate(buckets, start=1))
    assert len(set(buckets)) <= 60


def test_noise_keys_decide_the_samples():
    wanted = requests(COUNT, temperature=1.0)
    engine = tiny_engine(method="ar")
    other = [
        Request(
            row_id=r.row_id, prompt_ids=r.prompt_ids, sampling=r.sampling, noise_key=r.noise_key + 1
        )
        for r in wanted
    ]
    assert outputs_of(engine, wanted) != outputs_of(engine, other)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("num_done", [1, 2, 11])
def test_a_row_goes_on_elsewhere_after_any_prefix(temperature, num_done):
    wanted = requests(COUNT, temperature=temperature)
    whole = outputs_of(tiny_engine(drafter="dflash"), wanted)
    resumed = [
        Request(
            row_id=r.row_id,
            prompt_ids=r.prompt_ids,
            sampling=r.sampling,
            noise_key=r.noise_key,
            generated_ids=out[: min(num_done, len(out) - 1)],
        )
        for r, out in zip(wanted, whole, strict=True)
    ]
    rows = {c.row_id: c for c in tiny_engine(drafter="dflash").generate(resumed)}
    for request, output in zip(resumed, whole, strict=True):
        completion = rows[request.row_id]
        assert completion.output_ids == output
        committed = sum(record.num_committed for record in completion.records)
        assert committed == len(output) - len(request.generated_ids)


def test_methods_may_change_on_live_rows(family, expected):
    engine = tiny_engine(family, "dflash", max_batch=4)
    found = {}
    for request in requests(COUNT):
        engine.add(request)
    turns = ["ar", "ddtree", "dflash", "bastion"]
    while engine.has_work:
        engine.use(turns[engine.totals.num_steps // 3 % 4], nodes_per_row=5)
        found.update({c.row_id: c for c in engine.step()})
    assert [found[r.row_id].output_ids for r in requests(COUNT)] == expected
    used = {record.method for c in found.values() for record in c.records}
    assert used >= {"ar", "dflash", "ddtree"}


def test_a_method_that_drafts_needs_a_drafter():
    with pytest.raises(ValueError, match="method ddtree needs a drafter"):
        tiny_engine(method="ar").use("ddtree")
