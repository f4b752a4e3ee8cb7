"""Pools: names of accelerators, what is selected, places as machines come and go, and the money."""

from dataclasses import replace
from pathlib import Path

import pytest
from fault_store import MemoryStore
from io_jobs import planned

from bastion_batch.bench.balance import EqualSplit, Turn, compare
from bastion_batch.cluster.dtype import DTYPE_FILE, settle_dtype
from bastion_batch.cluster.ledger import Ledger, total_cost
from bastion_batch.cluster.node import NodeShare, num_gpus
from bastion_batch.cluster.placement import Placement
from bastion_batch.cluster.pool_preview import describe_pools
from bastion_batch.cluster.pools import NODE_ID_LABEL, Node, Pool, pools_of
from bastion_batch.cluster.shared_profiles import (
    SharedProfiles,
    StoreProfiles,
    shared_profiles,
)
from bastion_batch.config import PoolConfig, WorkersConfig, load_job, parse_job
from bastion_batch.core.accelerators import accelerator, find_accelerator, labels_of, may_be
from bastion_batch.core.devices import KNOWN_DEVICES
from bastion_batch.engine.keyed_files import file_name
from bastion_batch.engine.profiles import Profile
from bastion_batch.errors import JobFileError, OutputError
from bastion_batch.io.identity import require_same_job
from bastion_batch.io.sinks import dtypes_of
from bastion_batch.records import Stretch

TYPE = "ray.io/accelerator-type"


def node(name, gpus=0, cpus=8.0, kind=None, resources=(), **labels):
    labels |= {TYPE: kind} if kind else {}
    return Node(name, name, cpus, gpus, labels, dict(resources))


H100, A100 = node("h", 8, 64.0, "H100"), node("a", 4, 32.0, "A100")
A6000, CPU = node("r", 1, 16.0, "RTX-A6000"), node("c")


def pool(**fields):
    return Pool.of("p", PoolConfig(**fields))


def job(**sections):
    tree = {
        "input": {"path": "a", "prompt": "p"},
        "output": {"path": "o"},
        "model": {"target": "t"},
    }
    for name, fields in sections.items():
        tree[name] = tree.get(name, {}) | fields
    return parse_job(tree)


# Names


@pytest.mark.parametrize(
    ("name", "known"),
    [
        ("A100", "A100"),
        ("a100 80gb", "A100-80G"),
        ("A100-40G", "A100-40G"),
        ("NVIDIA A100-SXM4-80GB MIG 3g.40gb", "A100-80G"),
        ("RTX A6000", "RTX-A6000"),
        ("A6000", "RTX-A6000"),
        ("NVIDIA RTX A6000", "RTX-A6000"),
        ("RTX PRO 6000", "RTX-PRO-6000"),
        ("NVIDIA RTX 6000 Ada Generation", "RTX-6000-Ada"),
        ("4090", "RTX-4090"),
        ("GeForce-RTX-5090", "RTX-5090"),
        ("nvidia-tesla-t4", "T4"),
        ("NVIDIA-H100-80GB-HBM3", "H100"),
        ("Tesla V100-SXM2-16GB", "V100"),
        ("L40S", "L40S"),
        ("b200", "B200"),
    ],
)
def test_a_card_has_many_names(name, known):
    assert accelerator(name).name == known


@pytest.mark.parametrize("name", ["RTX", "RTX-6000", "A1000", "AMD EPYC 7B13", "scripted", ""])
def test_what_is_no_known_card_is_none(name):
    assert find_accelerator(name) is None


@pytest.mark.parametrize(
    ("name", "near"), [("H1OO", "H100"), ("rtx 4009", "RTX-4090"), ("A600O", "RTX-A6000")]
)
def test_an_unknown_name_is_refused_with_the_nearest(name, near):
    with pytest.raises(
        JobFileError, match=rf"accelerator '{name}' is not known; did you mean .*{near}"
    ):
        accelerator(name)


def test_every_device_whose_speed_is_known_has_a_name():
    assert all(find_accelerator(device) for device in KNOWN_DEVICES)


def test_a_label_that_says_less_is_taken_and_one_that_says_otherwise_is_not():
    assert may_be(accelerator("A100-80G"), "A100"), "Ray says no more"
    assert may_be(accelerator("A100"), "A100-80G")
    assert not may_be(accelerator("A100-80G"), "A100-40G")
    assert may_be(accelerator("A6000"), "RTX"), "a Ray of before 2026"
    assert may_be(accelerator("A6000"), "RTX-A6000")
    assert may_be(accelerator("4090"), "GeForce-RTX-4090")
    assert not may_be(accelerator("4090"), "RTX")
    assert not may_be(accelerator("A6000"), "RTX-PRO-6000")
    for name in ("A100-80G", "A6000", "RTX-6000-Ada", "4090", "H100"):
        assert all(may_be(accelerator(name), label) for label in labels_of(accelerator(name)))


# The job file


@pytest.mark.parametrize(
    ("workers", "message"),
    [
        ({"count": 2, "pools": [{}]}, "workers: give `pools` or `count`, not both"),
        ({"pools": [{"name": "x"}, {"name": "x"}]}, "two pools have the name 'x'"),
        ({"pools": [{"cuont": 1}]}, r"workers\.pools\.0\.cuont'; did you mean 'count'"),
        ({"pools": [{"select": {"labels": {}}}]}, "did you mean 'label'"),
        ({"pools": [{"select": {"label": {"k": "in(a"}}}]}, r"'in\(a' is none of value"),
        ({"pools": [{"select": {"label": {"k": "-a"}}}]}, "'-a' is none of value.*up to 63"),
        ({"pools": [{"select": {"label": {"k": "in(a b)"}}}]}, r"'in\(a b\)' is none of value"),
        ({"pools": [{"select": {"label": {"k": "a" * 64}}}]}, "a' is none of value"),
        ({"pools": [{"select": {"label": {"my key": "a"}}}]}, "'my key' cannot be the key"),
        ({"pools": [{"select": {"label": {"x./k": "a"}}}]}, "'x./k' cannot be the key"),
        ({"pools": [{"select": {"resource": {"slice": 1e-5}}}]}, "greater than or equal to 0.0001"),
        ({"pools": [{"select": {"resource": {"slice": float("inf")}}}]}, "finite number"),
        ({"pools": [{"select": {"resource": {"memory": 1}}}]}, "memory: "),
        ({"pools": [{"select": {"resource": {"GPU": 1}}}]}, "every worker takes one CPU"),
        ({"pools": [{"device": "cpu", "select": {"accelerator": "A100"}}]}, "other than cpu"),
        ({"pools": [{"dtype": "float32"}]}, r"workers\.pools\.0\.dtype is float32.*one dtype"),
        ({"pools": [{"price_per_hour": -1}]}, "greater than or equal to 0"),
    ],
)
def test_what_a_pool_cannot_be_is_refused(workers, message):
    with pytest.raises(JobFileError, match=message):
        job(workers=workers)


def test_the_short_form_is_one_pool():
    [one] = pools_of(job(workers={"count": 3, "threads": 2, "price_per_hour": 1.5}).workers)
    assert (one.name, one.config.count, one.config.threads) == ("workers", 3, 2)
    assert one.config.price_per_hour == 1.5
    assert all(one.selects(n) for n in (H100, CPU))


def test_pools_have_names_and_their_workers_see_their_own_fields_alone():
    select = {"accelerator": "A100"}
    whole = job(
        model={"allow_mixed_dtype": True, "dtype": "bfloat16"},
        workers={
            "profiles": "/shared",
            "pools": [{"select": select}, {"select": select, "max_batch": 4}, {"dtype": "float32"}],
        },
    )
    first, second, third = pools_of(whole.workers)
    assert [p.name for p in (first, second, third)] == ["a100", "a100-1", "workers"]
    assert whole.with_pool(second.config).workers.max_batch == 4
    assert whole.with_pool(second.config).workers.profiles == "/shared"
    assert whole.with_pool(second.config).model.dtype == "bfloat16"
    assert whole.with_pool(third.config).model.dtype == "float32"


# What is selected


def test_selection_by_label_and_by_the_older_resource():
    a100 = pool(select={"accelerator": ["A100", "A6000"]})
    older = node("old", 2, resources={"accelerator_type:A100": 1.0})
    assert [n.host for n in (H100, A100, A6000, CPU, older) if a100.selects(n)] == ["a", "r", "old"]
    unlabelled = node("u", 4)
    assert not a100.selects(unlabelled)
    assert pool().selects(unlabelled)


def test_label_expressions_need_the_label():
    nodes = [node("eu", zone="eu"), node("us", zone="us"), node("bare")]

    def hosts(expression):
        return [n.host for n in nodes if pool(select={"label": {"zone": expression}}).selects(n)]

    assert hosts("eu") == ["eu"]
    assert hosts("in(eu, us)") == ["eu", "us"]
    assert hosts("!eu") == ["us"], "Ray's own would take the one without the label"
    assert hosts("!in(us)") == ["eu"]


def test_resources_bound_the_workers_of_a_node():
    slice_pool = pool(select={"resource": {"slice": 2}}, device="cpu", count=5)
    roomy = node("roomy", resources={"slice": 5.0})
    placement = Placement([slice_pool])
    placement.look([roomy, CPU])
    homes = [slot.node.host if slot.node else None for slot in placement.slots.values()]
    assert homes == ["roomy", "roomy", None, None, None]


def test_ray_is_told_every_spelling_but_never_a_negation():
    a6000 = pool(select={"accelerator": "A6000", "label": {"zone": "eu"}})
    assert a6000.label_selector([]) == {"zone": "eu", TYPE: "in(RTX-A6000,RTX)"}
    negated = pool(select={"label": {"zone": "!us"}})
    assert negated.label_selector([node("x"), node("b")]) == {NODE_ID_LABEL: "in(b,x)"}
    assert not negated.may_wait


# Places


def hosts(slots):
    return [(s.worker, s.pool.name, s.node.host if s.node else None, s.device) for s in slots]


def placement_of(*configs, **options):
    return Placement(pools_of(WorkersConfig(pools=configs)), **options)


MIXED = (
    {"select": {"accelerator": "H100"}, "count": 2},
    {"select": {"accelerator": ["A100", "A6000"]}},
)


def test_each_pool_takes_its_own_machines():
    placement = placement_of(*MIXED)
    new = placement.look([CPU, H100, A100, A6000])
    assert hosts(new) == [
        *((f"w{i}", "h100", "h", "cuda") for i in range(2)),
        *((f"w{i}", "a100+a6000", "a", "cuda") for i in range(2, 6)),
        ("w6", "a100+a6000", "r", "cuda"),
    ]
    assert [slot.workers_on_node for slot in new] == [2, 2, 4, 4, 4, 4, 1]
    assert placement.look([CPU, H100, A100, A6000]) == [], "nothing is new"


def test_two_pools_share_the_gpus_of_a_machine_and_never_twice():
    placement = placement_of({"name": "one", "count": 3}, {"name": "rest"})
    counts = [slot.pool.name for slot in placement.look([A100])]
    assert counts == ["one"] * 3 + ["rest"]


def test_a_pool_that_follows_gets_workers_for_machines_that_come():
    placement = placement_of(*MIXED)
    placement.look([H100])
    assert [p.name for p in placement.without_place()] == ["a100+a6000"]
    assert hosts(placement.look([H100, A6000])) == [("w2", "a100+a6000", "r", "cuda")]
    assert placement.look([H100, A6000]) == []
    assert placement.without_place() == []


def test_a_machine_in_place_of_another_is_not_counted_twice():
    placement = placement_of({"select": {"accelerator": "A100"}})
    placement.look([A100])
    for worker in placement.slots:
        placement.lose_home(worker)
    fresh = node("fresh", 4, 32.0, "A100")
    assert placement.look([fresh]) == [], "those without a home go first"
    for worker in list(placement.slots):
        placement.settle(worker, "fresh")
    assert placement.look([fresh]) == []
    assert len(placement.look([fresh, A100])) == 4
    assert len(placement.slots) == 8


def test_a_worker_that_was_given_up_leaves_its_gpu_alone():
    placement = placement_of({})
    placement.look([A6000])
    placement.give_up("w0")
    assert placement.look([A6000]) == []
    assert len(placement.look([A6000, A100])) == 4


def test_machines_to_avoid_get_none():
    placement = placement_of({})
    assert hosts(placement.look([A6000, A100], avoid={"a"})) == [("w0", "workers", "r", "cuda")]


def test_where_machines_come_when_asked_for_one_is_asked_for():
    placement = placement_of({"select": {"accelerator": "A100"}}, may_grow=True)
    [slot] = placement.look([CPU])
    assert (slot.node, slot.device, slot.workers_on_node) == (None, "cuda", None)
    assert not placement.has_home
    assert placement.selector(slot) == {TYPE: "in(A100,A100-40G,A100-80G)"}
    assert placement.look([CPU]) == []
    placement.settle("w0", "nowhere")
    placement.look([CPU, A100])
    placement.settle("w0", "a")
    assert len(placement.look([CPU, A100])) == 3


def test_without_gpus_one_worker_for_each_machine_until_gpus_come():
    placement = placement_of({})
    assert hosts(placement.look([CPU, node("d")])) == [
        ("w0", "workers", "c", "cpu"),
        ("w1", "workers", "d", "cpu"),
    ]
    assert hosts(placement.look([CPU, node("d"), A6000])) == [("w2", "workers", "r", "cuda")]


def test_a_negated_pool_waits_for_a_machine_that_ray_would_not_wait_for():
    only = {"select": {"label": {"zone": "!us"}}, "count": 1, "device": "cpu"}
    placement = placement_of(only)
    [slot] = placement.look([CPU])
    assert placement.selector(slot) is None
    eu = node("eu", zone="eu")
    placement.look([CPU, eu])
    assert placement.selector(slot) == {NODE_ID_LABEL: "in(eu)"}


def test_the_share_of_a_machine_nobody_knew_beforehand(tmp_path):
    assert num_gpus(tmp_path / "none") == 1
    for number in range(4):
        (tmp_path / f"gpu{number}").mkdir()
    assert num_gpus(tmp_path) == 4
    assert NodeShare.of("auto", None, "cpu").num_threads >= 1
    assert NodeShare.of(3, None, "cuda").num_threads == 3


# The real device


def test_a_device_that_is_not_what_was_selected_is_told():
    a100 = pool(select={"accelerator": "A100"}, price_per_hour=2.0)
    assert a100.mismatch("NVIDIA A100-SXM4-80GB") is None
    message = "pool p selects A100; the device is NVIDIA RTX A6000"
    assert a100.note_on("NVIDIA RTX A6000") == {
        "pool": "p",
        "price_per_hour": 2.0,
        "mismatch": message,
    }
    large = pool(select={"accelerator": "A100-80G"})
    assert large.mismatch("NVIDIA A100-PCIE-40GB") is not None
    assert pool().mismatch("anything") is None


# Money


def test_a_place_is_paid_for_from_its_first_moment_to_its_last():
    placement = placement_of(
        {"name": "paid", "count": 1, "price_per_hour": 3.6}, {"name": "own", "count": 1}
    )
    placement.look([A100])
    ledger = Ledger()
    ledger.placed(1, placement.slots["w0"], 100.0)
    ledger.placed(2, placement.slots["w1"], 100.0)
    ledger.ended(7, 100.0)
    ledger.ended(1, 600.0)
    ledger.ended(1, 900.0)
    held = ledger.held(1100.0)
    assert [(h.pool, h.seconds, h.holds, h.cost) for h in held] == [
        ("paid", 500.0, False, pytest.approx(0.5)),
        ("own", 1000.0, True, None),
    ]
    assert total_cost(held) == pytest.approx(0.5)
    assert total_cost(held[1:]) is None


# One dtype


def test_the_first_settles_the_dtype_of_all():
    store = MemoryStore(root="/out")
    assert settle_dtype(job(), store, lambda: "bfloat16").model.dtype == "bfloat16"
    assert settle_dtype(job(), store, lambda: "float32").model.dtype == "bfloat16"


@pytest.mark.parametrize("model", [{"dtype": "float32"}, {"allow_mixed_dtype": True}])
def test_a_job_that_says_its_dtype_or_allows_several_settles_none(model):
    store = MemoryStore(root="/out")
    wanted = job(model=model)
    assert settle_dtype(wanted, store, lambda: "bfloat16") is wanted
    assert not store.exists(DTYPE_FILE)


# What `plan` says


def test_plan_shows_what_each_pool_matches():
    workers = WorkersConfig(
        pools=(
            {"select": {"accelerator": "H100"}, "price_per_hour": 2.5},
            {"select": {"accelerator": "L40S"}, "count": 2},
        )
    )
    assert describe_pools(workers, [H100, CPU]) == [
        "pool h100 (accelerator H100; one per GPU), $2.50 an hour each: 8 on h (H100)",
        "pool l40s (accelerator L40S; 2 workers): 2 without a machine now",
        "there are: h 64 CPUs 8 GPUs (H100), c 8 CPUs 0 GPUs",
    ]
    assert describe_pools(workers, None)[0].endswith("no cluster runs here")


# Profiles


class Shelf:
    """Profiles in memory, and how often one was put there."""

    def __init__(self):
        self.held, self.num_saved = {}, 0

    def load(self, key):
        return self.held.get(file_name(key))

    def save(self, profile):
        self.num_saved += 1
        self.held[file_name(profile.key)] = profile


def learnt(costs=1):
    return Profile(key={"device": "abacus"}, costs={"verify": costs})


def test_what_one_worker_measures_the_others_find():
    shared = Shelf()
    first, second = (SharedProfiles(Shelf(), shared) for _ in range(2))
    assert first.load(learnt().key) is None
    first.save(learnt())
    assert second.load(learnt().key) == learnt()


def test_only_its_maker_keeps_a_shared_profile_up_to_date():
    shared = Shelf()
    first, second = (SharedProfiles(Shelf(), shared) for _ in range(2))
    first.save(learnt())
    second.save(learnt(2))
    assert shared.load(learnt().key) == learnt()
    first.save(learnt(3))
    assert shared.load(learnt().key) == learnt(3)
    assert shared.num_saved == 2
    assert second.load(learnt().key) == learnt(2), "its own machine's first"


def test_a_machine_that_knew_already_shares_what_it_knows():
    own, shared = Shelf(), Shelf()
    own.save(learnt())
    SharedProfiles(own, shared).load(learnt().key)
    assert shared.load(learnt().key) == learnt()


@pytest.mark.parametrize("kind", ["directory", "objects"])
def test_profiles_lie_in_the_output_or_where_the_job_says(tmp_path, monkeypatch, kind):
    monkeypatch.setenv("BASTION_BATCH_PROFILES", str(tmp_path / "own"))
    if kind == "objects":
        store = MemoryStore(root="/out")
        StoreProfiles(store, "_bastion/profiles").save(learnt())
        assert store.names("_bastion/profiles") == [f"_bastion/profiles/{file_name(learnt().key)}"]
        assert StoreProfiles(store, "_bastion/profiles").load(learnt().key) == learnt()
        assert StoreProfiles(store).load(learnt().key) is None
        return
    output = {"path": str(tmp_path / "out")}
    shared_profiles(job(output=output)).save(learnt())
    assert (tmp_path / "out/_bastion/profiles" / file_name(learnt().key)).exists()
    elsewhere = job(output=output, workers={"profiles": str(tmp_path / "all")})
    shared_profiles(elsewhere).save(learnt())
    assert (tmp_path / "all" / file_name(learnt().key)).exists()


# The column


def mixed_plan(tmp_path, **changes):
    return planned(tmp_path, model__allow_mixed_dtype=True, **changes)


def test_rows_say_their_dtype_where_it_may_differ(tmp_path):
    plan = mixed_plan(tmp_path)
    assert plan.data_schema.field("dtype").type == "string"
    stretches = [
        [Stretch("w0", 1, "x", 1, "float32")],
        [Stretch("w0", 1, "x", 1, "float32"), Stretch("w1", 2, "y", 1, "bfloat16")],
        [Stretch("w0", 1, "x", 1, "bfloat16"), Stretch("w1", 2, "y", 1, "bfloat16")],
        [Stretch("w0", 1, "x", 2)],
    ]
    assert [dtypes_of(s) for s in stretches] == ["float32", "float32+bfloat16", "bfloat16", None]


def test_other_jobs_have_no_such_column_and_old_plans_are_theirs(tmp_path):
    plan = planned(tmp_path)
    assert "dtype" not in plan.data_schema.names
    older = {k: v for k, v in plan.identity.items() if k != "model.allow_mixed_dtype"}
    require_same_job(replace(plan, identity=older), plan.identity)
    mixed = plan.identity | {"model.allow_mixed_dtype": True}
    with pytest.raises(OutputError, match=r"model\.allow_mixed_dtype: false -> true"):
        require_same_job(replace(plan, identity=older), mixed)


# The measurement on a real machine


def units(spans=(0, 0, 0, 1, 1)):
    return {"spans": spans, "num_outputs": [2] * len(spans)}


def test_an_equal_split_gives_each_worker_its_half_once_both_are_there(tmp_path):
    split = EqualSplit(tmp_path / "seconds", **units())
    for worker in (7, 8):
        split.join(worker, kind="cpu", max_batch=2, now=0.0)
    assert split.lease(7, 1.0) is None, "the other one still loads"
    assert [split.lease(8, 2.0) for _ in range(3)] == [3, 4, None]
    assert [split.lease(7, 2.0) for _ in range(4)] == [0, 1, 2, None]
    assert not (tmp_path / "seconds").exists()
    split.finish(3)
    assert float((tmp_path / "seconds").read_text()) >= 0.0
    assert split.lease(8, 3.0) is None, "it helps nobody"


def test_the_gain_is_held_against_what_the_rates_predict():
    turn = Turn("ours", 20.0, {"float32": 100.0, "bfloat16": 300.0}, {}, 5, 8000, (4000, 4000))
    report = compare([turn, turn._replace(policy="equal", seconds=39.0)])
    assert report["predicted_gain"] == pytest.approx(2.0)
    assert report["observed_gain"] == pytest.approx(1.95)
    assert report["observed_over_predicted"] == pytest.approx(0.975)


def test_the_job_for_a_mixed_pool_is_a_job():
    wanted = load_job(Path(__file__).parents[1] / "jobs/mixed-pool.yaml")
    assert [p.name for p in pools_of(wanted.workers)] == ["h100", "a100", "a6000"]


@pytest.mark.parametrize(
    "label",
    [
        {"zone": "eu-1_a.b"},
        {"ray.io/node-id": "!abc"},
        {"my.org/kind": "in(a, b,c)"},
        {"k": "!in(a)"},
        {"0": "x" * 63},
    ],
)
def test_labels_that_pass_are_labels_that_ray_takes(label):
    from ray._private.label_utils import validate_label_selector

    assert pool(select={"label": label}).config.select.label == label
    assert validate_label_selector(label) is None


def test_ray_is_told_of_the_machines_that_are_selected_however_they_are_labelled():
    a100 = pool(select={"accelerator": "A100"})
    by_hand = node("hand", 4, kind="a100")
    older = node("old", 2, resources={"accelerator_type:A100": 1.0})
    assert a100.selects(by_hand)
    assert a100.selects(older)
    assert a100.label_selector([by_hand]) == {TYPE: "in(A100,A100-40G,A100-80G,a100)"}
    assert a100.label_selector([older]) == {NODE_ID_LABEL: "in(old)"}


def test_a_slot_that_loses_its_machine_is_to_share_the_next_one():
    placement = placement_of({"count": 4, "device": "cpu"})
    placement.look([CPU])
    assert placement.lose_home("w0").workers_on_node == 4
    placement.look([A100])
    placement.settle("w0", "a")
    assert placement.slots["w0"].workers_on_node == 1


def test_one_worker_for_each_machine_also_where_one_is_gone():
    placement = placement_of({"device": "cpu", "select": {"label": {"zone": "!us"}}})
    eu = [node(f"eu{i}", zone="eu") for i in range(3)]
    placement.look(eu[:2])
    slot = placement.lose_home("w0")
    assert placement.closed_to(slot) == {"eu1"}
    placement.look(eu[1:])
    assert placement.selector(slot) == {NODE_ID_LABEL: "in(eu2)"}


def test_the_device_of_a_pool_is_decided_when_there_is_a_machine():
    placement = placement_of(
        {"name": "a", "count": 1}, {"select": {"label": {"k": "v"}}, "count": 2}
    )
    assert [slot.pool.name for slot in placement.look([CPU])] == ["a"]
    assert [pool.name for pool in placement.undecided()] == ["workers"]
    labelled = node("g", 2, k="v")
    assert hosts(placement.look([CPU, labelled])) == [
        ("w1", "workers", "g", "cuda"),
        ("w2", "workers", "g", "cuda"),
    ]
    assert placement.undecided() == []


def test_made_names_are_never_those_of_others():
    configs = ({"name": "workers-2"}, {}, {})
    assert [p.name for p in pools_of(WorkersConfig(pools=configs))] == [
        "workers-2",
        "workers",
        "workers-3",
    ]


def test_a_pool_of_cpus_is_one_worker_per_machine():
    assert "one per machine" in pool(device="cpu").describe()
    assert "one per GPU" in pool().describe()
