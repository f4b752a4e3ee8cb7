"""The engine's text is the target's own, for every method, tree, batch and drafter."""

import pytest
import torch
from tiny import outputs_of, requests, tiny_engine, tiny_module

from bastion_batch.engine.drafters.fakes import MuteDrafter, RandomDrafter, ScriptedDrafter
from bastion_batch.records import Request

FAMILIES = ["llama", "qwen3"]
COUNT = 8


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


@pytest.fixture(scope="module", params=FAMILIES)
def family(request):
    return request.param


@pytest.fixture(scope="module")
def expected(family):
    outputs = reference(family, requests(COUNT))
    assert len(set(outputs)) > 1, "the models say different things"
    return outputs


@pytest.mark.parametrize("max_batch", [1, 3, 8])
@pytest.mark.parametrize("method", ["ar", "dflash", "ddtree", "bastion"])
def test_greedy_text_equals_transformers(family, expected, method, max_batch):
    engine = tiny_engine(family, "dflash", method=method, max_batch=max_batch)
    assert outputs_of(engine, requests(COUNT)) == expected


@pytest.mark.parametrize("num_nodes", [1, 2, 3, 5, 8, 13, 21, 34, 64])
def test_no_budget_changes_the_text(family, expected, num_nodes):
    drafter = RandomDrafter(97, depth=5, num_ranks=8, seed=num_nodes)
    engine = tiny_engine(family, drafter, method="ddtree", nodes_per_row=num_nodes, max_batch=4)
    assert outputs_of(engine, requests(COUNT)) == expected
    assert engine.totals.num_nodes > 0


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
    {"temperature": 1.0, "top_k": 5, "min_p": 0.05},
    {"temperature": 1.0, "repetition_penalty": 1.3, "presence_penalty": 0.4},
    {"temperature": 0.0, "frequency_penalty": 0.7, "min_new_tokens": 20},
]


@pytest.mark.parametrize("sampling", SAMPLED, ids=str)
def test_any_tree_gives_the_same_samples(sampling):
    wanted = requests(COUNT, **sampling)
    plain = outputs_of(tiny_engine(method="ar", max_batch=1), wanted)
    scripts = {r.prompt_ids: out for r, out in zip(wanted, plain, strict=True)}
    drafters = [
        ScriptedDrafter(scripts, 97, depth=5),
        ScriptedDrafter(scripts, 97, depth=5, shift=3),
        RandomDrafter(97, depth=4, num_ranks=20),
        MuteDrafter(),
        "dflash",
    ]
    for drafter in drafters:
        for max_batch in (1, 8):
            engine = tiny_engine(drafter=drafter, method="bastion", max_batch=max_batch)
            assert outputs_of(engine, wanted) == plain
    oracle = tiny_engine(drafter=drafters[0], method="dflash")
    assert outputs_of(oracle, wanted) == plain
    assert oracle.totals.num_accepted > oracle.totals.num_row_steps


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
