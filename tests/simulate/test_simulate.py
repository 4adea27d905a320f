from dataclasses import replace
from itertools import pairwise

import msgspec
import pytest
from tests.support.synthetic import Region, chain, network
from tests.verify import captured
from tests.verify.plans import CASES, case, drop, find, interleaved, make, pipeline

from piper import apply, load_timeline, plan, schedules
from piper.directives.place import Place
from piper.directives.recompute import Recompute
from piper.directives.replicate import Replicate
from piper.directives.split import Split
from piper.dtypes import DType
from piper.errors import ConfigError, PlanError
from piper.ops.compute import Compute
from piper.ops.p2p import Send
from piper.plan.account import account, adam_bytes
from piper.plan.costs import Hardware, UnitCosts, hardware
from piper.plan.memory import Category
from piper.plan.profile import Exchange, Profile, Rate, load_profile
from piper.plan.topology import Contention, Link, Topology, alone_seconds, traffic
from piper.plan.work import body_work
from piper.simulate import simulate
from piper.simulate.critical import shares
from piper.simulate.playback import play

UNIT = UnitCosts()


def flat(stages, microbatches, orders):
    """A pipeline without replicas."""
    placed = [Place({"PP": s}, devices=[s]) for s in range(stages)]
    split = Split({}, num_microbatches=microbatches)
    return plan(apply(chain(stages, batch_size=2 * microbatches), [*placed, split, *orders]))


@pytest.mark.parametrize(("p", "m"), [(2, 2), (2, 8), (4, 4), (4, 16), (8, 8)])
@pytest.mark.parametrize("schedule", [schedules.gpipe, schedules.one_f_one_b])
def test_the_bubble_of_gpipe_and_1f1b_is_as_published(schedule, p, m):
    """(p - 1) / (m + p - 1): Huang et al. 2019, Narayanan et al. 2021."""
    line = simulate(flat(p, m, schedule(p, m)), UNIT)
    assert line.bubble == pytest.approx((p - 1) / (m + p - 1), abs=1e-12)
    assert line.seconds == pytest.approx(3 * (m + p - 1))


@pytest.mark.parametrize(("p", "v", "m"), [(2, 2, 4), (2, 4, 8), (4, 2, 8)])
def test_the_bubble_of_interleaved_1f1b_is_as_published(p, v, m):
    """(p - 1) / (v·m + p - 1): Narayanan et al. 2021."""
    line = simulate(make(chain(p * v, batch_size=2 * m), interleaved(p, v, m)), UNIT)
    assert line.bubble == pytest.approx((p - 1) / (v * m + p - 1), abs=1e-12)


@pytest.mark.parametrize("name", CASES)
def test_without_links_it_is_playback(name):
    subject = case(name)
    nodes = subject.dag.nodes

    def durations(_device, instruction):
        is_chunk = isinstance(instruction, Compute)
        return UNIT.chunk(subject.dag, {}, nodes[instruction.node]) if is_chunk else 0.0

    line, tracks = simulate(subject, UNIT), play(subject, durations)
    assert line.seconds == max(played.end for track in tracks for played in track)
    for mine, track in zip(line.devices, tracks, strict=True):
        for box in mine.boxes():
            assert (box.start, box.end) == (track[box.position].start, track[box.position].end)


@pytest.mark.parametrize("device", ["H100", "CPU"])
@pytest.mark.parametrize("name", CASES)
def test_what_must_hold_of_any_execution(name, device):
    subject = case(name)
    line = simulate(subject, device)
    ends = {}
    together = {}
    for mine in line.devices:
        for lane in mine.lanes:
            assert all(one.end <= two.start for one, two in pairwise(lane.boxes))
        chunks = [b for b in mine.boxes() if b.op == "compute"]
        assert all(one.end <= two.start for one, two in pairwise(chunks))
        for box in mine.boxes():
            ends[mine.device, box.node] = max(ends.get((mine.device, box.node), 0), box.end)
            if box.meeting:
                together.setdefault(box.meeting, set()).add((box.start, box.end))
    assert all(len(times) == 1 for times in together.values())
    for mine in line.devices:
        for box in (b for b in mine.boxes() if b.op == "compute"):
            for before in subject.dag.predecessors[box.node]:
                assert ends.get((mine.device, before), 0) <= box.start
    assert line.seconds == pytest.approx(max(ends.values()), rel=0.2)


@pytest.mark.parametrize("device", ["H100", "CPU", "unit"])
def test_the_same_plan_gives_the_same_timeline(device):
    costs = UNIT if device == "unit" else device
    one, two = simulate(case("zero 3"), costs), simulate(case("zero 3"), costs)
    assert one == two


def test_memory_is_the_planned_one():
    subject = case("zero 2")
    line = simulate(subject, "CPU", optimizer_bytes=adam_bytes)
    for mine, planned in zip(line.devices, account(subject, adam_bytes), strict=True):
        assert mine.peak == planned.peak
        assert max(map(sum, zip(*mine.memory.nbytes.values(), strict=True))) == planned.peak
        assert list(mine.memory.times) == sorted(mine.memory.times)
        assert sum(mine.peak_by_category.values()) == planned.peak


def test_memory_rises_when_the_forwards_run():
    """Receives are posted long before their messages come: what follows them is not late for
    that.
    """
    line = simulate(flat(2, 4, schedules.one_f_one_b(2, 4)), UNIT)
    curve = line.devices[0].memory
    assert curve.times[0] == 0.0
    activations = zip(curve.times, curve.nbytes[Category.ACTIVATIONS.value], strict=True)
    risen = [time for time, nbytes in activations if nbytes]
    assert risen[0] == 1.0  # when the first of them ends
    assert 2.0 in risen


def test_the_critical_path_is_as_long_as_the_step_and_explains_it():
    line = simulate(flat(4, 8, schedules.one_f_one_b(4, 8)), UNIT)
    path = line.critical_path
    assert path[0].start == 0
    assert path[-1].end == line.seconds
    assert all(one.end == two.start for one, two in pairwise(path))
    top = shares(line)
    assert sum(share.seconds for share in top) == pytest.approx(line.seconds)
    assert {(share.what.split()[0]) for share in top} == {"F", "B"}
    critical = {(d.device, b.position) for d in line.devices for b in d.boxes() if b.critical}
    assert critical == {(link.device, link.position) for link in path}


def test_a_slow_stage_is_on_the_critical_path():
    """The second stage takes ten times as long: it is what to improve first."""
    subject = flat(3, 6, schedules.one_f_one_b(3, 6))

    class Uneven(UnitCosts):
        def chunk(self, dag, bindings, chunk):
            slow = 10 if ("PP", 1) in chunk.tags else 1
            return slow * super().chunk(dag, bindings, chunk)

    line = simulate(subject, Uneven())
    assert [share.what for share in shares(line, 2)] == ["B PP=1", "F PP=1"]
    assert line.devices[1].bubble < 0.1 < line.devices[0].bubble


# --- links: two stages with one 128-byte activation (2 rows × 8 float64) per microbatch


def linked(stages, microbatches, topology, replicas=1, **options):
    """A device that computes for 1 s per chunk, connected as said; and the timeline of a pipeline
    on it.
    """

    class Steady(Hardware):
        def chunk(self, dag, bindings, chunk):
            return 1.0

        def local(self, op, nbytes):
            return 0.0

    one = Link(0.0, 1.0)
    costs = Steady(
        "steady", {DType.FLOAT64: 1.0}, 1.0, one, one, launch=0.0, peak_dtype=DType.FLOAT64
    )
    object.__setattr__(costs, "topology", topology)
    rows = 2 * microbatches * replicas
    strategy = pipeline(stages, replicas=replicas, microbatches=microbatches)
    return simulate(make(chain(stages, batch_size=rows), strategy), costs, **options)


def sends(line, device):
    return [(b.start, b.end) for b in line.devices[device].boxes() if b.op == "send"]


def test_a_message_takes_latency_and_bytes_over_bandwidth():
    link = Link(0.5, 64.0)
    line = linked(2, 1, Topology(1, 2, link, link))
    # F0 ends at 1; 0.5 s latency and 128 bytes at 64 per second.
    assert sends(line, 0) == [(1.0, 3.5)]
    assert sends(line, 1) == [(5.5, 8.0)]
    assert line.seconds == 9.0


def test_two_messages_in_one_port_share_its_bandwidth():
    """Two replicas of a stage on one node send at the same time to the other node, through one
    connection.
    """
    fast, slow = Link(0.0, 1e12), Link(0.0, 128.0)
    shared = linked(2, 1, Topology(2, 2, fast, slow, nics=1), replicas=2)
    apart = linked(2, 1, Topology(2, 2, fast, slow, nics=2), replicas=2)
    assert sends(shared, 0) == sends(shared, 1) == [(1.0, 3.0)]  # 256 bytes at 128 per second
    assert sends(apart, 0) == sends(apart, 1) == [(1.0, 2.0)]


def test_messages_to_two_devices_share_the_senders_port():
    link = Link(0.0, 64.0)
    subject = make(chain(3, batch_size=2, skip=True), pipeline(3, microbatches=1))

    class Steady(UnitCosts):
        def topology_for(self, num_devices):
            return Topology(1, num_devices, link, link)

        def chunk(self, dag, bindings, chunk):
            return 1.0

    line = simulate(subject, Steady())
    # Device 0's result goes to devices 1 and 2 at once: both leave at half the speed.
    assert [(b.start, b.end) for b in line.devices[0].boxes() if b.op == "send"] == [
        (1.0, 5.0),
        (1.0, 5.0),
    ]


def test_full_duplex_directions_do_not_share():
    link = Link(0.0, 128.0)
    line = linked(2, 4, Topology(1, 2, link, link))
    assert all(end - start == 1.0 for d in (0, 1) for start, end in sends(line, d))


@pytest.mark.parametrize(
    ("level", "op", "seconds"),
    [
        # The weight has 8 × 8 float64, 512 bytes, on four members of one node at 128 bytes per
        # second.
        ({}, "all_reduce_bucket", 2 * 3 / 4 * 512 / 128),
        ({"shard_grads": True}, "reduce_scatter_bucket", 3 / 4 * 512 / 128),
        ({"shard_params": True}, "all_gather_bucket", 3 / 4 * 512 / 128),
    ],
)
def test_collectives_take_the_time_of_a_ring(level, op, seconds):
    link = Link(0.0, 128.0)
    subject = make(
        chain(2, batch_size=8),
        [Place({}, [0, 1, 2, 3]), Replicate({}, **level), Split({}, num_microbatches=1)],
    )

    class Steady(UnitCosts):
        def topology_for(self, num_devices):
            return Topology(1, num_devices, link, link)

    boxes = [b for b in simulate(subject, Steady()).devices[0].boxes() if b.op == op]
    assert min(b.seconds for b in boxes) == pytest.approx(seconds)


def test_between_nodes_there_are_as_many_rings_as_connections():
    fast, slow = Link(0.0, 1e12), Link(0.0, 128.0)
    subject = make(chain(2, batch_size=8), [Place({}, [0, 1, 2, 3]), Replicate({})])

    def reduction(nics):
        class Steady(UnitCosts):
            def topology_for(self, num_devices):
                del num_devices
                return Topology(2, 2, fast, slow, nics)

        boxes = simulate(subject, Steady()).devices[0].boxes()
        return min(b.seconds for b in boxes if b.op == "all_reduce_bucket")

    assert reduction(1) == pytest.approx(2 * reduction(2))


# --- what a profile says of communication


def replicated(**options):
    """Two stages on two devices of one node: the 512 bytes of the second one's weight are reduced
    while the first one's backward runs.
    """
    return make(chain(2, batch_size=4), [Place({}, [0, 1]), Replicate({}, **options)])


def measured(subject, **options):
    nothing = Rate(0.0, 0.0)
    return Profile(
        version=2,
        machine="here",
        chunks={f"{body}@s0=2": 1.0 for body in subject.dag.bodies},
        rates={"*": nothing},
        launch=0.0,
        messages=Exchange(nothing, Rate(0.0, 1e-3)),
        **options,
    )


def lengths(line, op):
    return [b.end - b.start for b in line.devices[0].boxes() if b.op == op]


def test_a_collective_takes_what_was_measured():
    subject = replicated()
    exchange = Exchange(Rate(0.25, 1 / 512), Rate(0.5, 2 / 512))
    costs = measured(subject, collectives={"all_reduce": {2: exchange}})
    line = simulate(subject, costs)
    assert lengths(line, "all_reduce_bucket") == [pytest.approx(2.5)] * 2
    # After three chunks the host issues the first reduction for 1.25 s; the second one waits for
    # it.
    assert line.seconds == pytest.approx(3 + 1.25 + 2.5 + 2.5)
    unpacked = msgspec.structs.replace(costs, unpacking={"all_reduce_bucket": Rate(0.0, 1 / 1024)})
    assert simulate(subject, unpacked).seconds == pytest.approx(line.seconds + 2)


def test_a_collective_of_more_members_than_were_measured_is_extrapolated():
    """As rings and doublings go: from 2 to 4 members an all-gather's bytes grow from 1/2 to 3/4,
    its rounds from 1 to 2.
    """
    link = Link(0.5, 128.0)
    known = Topology(1, 4, link, link, collectives={"all_gather": {2: Link(1.0, 64.0)}})
    for role in ("all_gather", "refresh"):
        two, four = (
            alone_seconds(known, traffic(known, role, tuple(range(n)), 128.0)) for n in (2, 4)
        )
        assert two == pytest.approx(1.0 + 128 / 64)
        assert four == pytest.approx(2.0 + 128 / 64 * 1.5)


def test_computation_and_communication_slow_each_other_down():
    """The first of two reductions is under way while the second backward runs."""
    subject = replicated(shard_grads=True)
    exchange = Exchange(Rate(0.0, 0.0), Rate(0.0, 0.2 / 256))
    costs = measured(subject, collectives={"reduce_scatter": {2: exchange}})
    alone = simulate(subject, costs)
    assert lengths(alone, "reduce_scatter_bucket")[0] == pytest.approx(0.2)
    both = simulate(subject, msgspec.structs.replace(costs, contention=Contention(0.5, 0.4)))
    # 0.2 s at two fifths of the speed are 0.5 s, in which half as much is computed: 0.25 s are
    # lost.
    assert lengths(both, "reduce_scatter_bucket")[0] == pytest.approx(0.5)
    assert max(lengths(both, "compute")) == pytest.approx(1.25)
    assert both.seconds == pytest.approx(alone.seconds + 0.25)


def test_contention_that_costs_nothing_changes_nothing():
    for name in ("1f1b deep", "zero 3, tied, weighted", "two ways"):
        with_contention = replace(hardware("CPU"), contention=Contention(1.0, 1.0))
        one, two = (simulate(case(name), costs) for costs in ("CPU", with_contention))
        assert one.seconds == pytest.approx(two.seconds, rel=1e-9)
        assert one.bubble == pytest.approx(two.bubble)


# --- hosts


def test_a_wait_stops_all_of_a_cpu_but_one_stream_of_a_gpu():
    """So a CPU is never quicker."""
    costs = UnitCosts(host_blocks=True)
    for name in ("1f1b deep", "zero 3, tied, weighted", "two ways"):
        assert simulate(case(name), UNIT).seconds <= simulate(case(name), costs).seconds


def test_a_cpu_issues_one_thing_after_the_other():
    line = simulate(case("zero 2"), "CPU")
    for mine in line.devices:
        local = sorted(
            (b for b in mine.boxes() if not b.meeting), key=lambda box: (box.start, box.end)
        )
        assert all(one.end <= two.start for one, two in pairwise(local))
        assert [b.position for b in local] == sorted(b.position for b in local)


# --- files and mistakes


def test_a_timeline_is_a_file(tmp_path):
    line = simulate(case("zero 1"), "A100")
    line.save(tmp_path / "line.json")
    assert load_timeline(tmp_path / "line.json") == line


def test_a_timeline_of_another_version_is_refused(tmp_path):
    (tmp_path / "line.json").write_text('{"version": 99}')
    with pytest.raises(PlanError, match="version 99, this piper reads version 1"):
        load_timeline(tmp_path / "line.json")
    (tmp_path / "line.json").write_text('{"version": 1}')
    with pytest.raises(PlanError, match=r"line\.json: .*missing"):
        load_timeline(tmp_path / "line.json")


def test_an_unknown_preset_lists_the_known_ones():
    with pytest.raises(ConfigError, match=r"did you mean 'H100'.*known: A100, H100, H200, CPU"):
        simulate(case("1f1b"), "h10")


def test_too_few_devices():
    link = Link(0.0, 1.0)
    costs = hardware("H100", Topology(1, 2, link, link))
    with pytest.raises(ConfigError, match="needs 4 devices, but the topology has 2"):
        simulate(case("1f1b deep"), costs)


@pytest.mark.parametrize("nodes", [(0, 1, 1), (1, 0, 1), (1, 1, 0)])
def test_an_empty_topology(nodes):
    link = Link(0.0, 1.0)
    with pytest.raises(ConfigError, match="at least 1"):
        Topology(nodes[0], nodes[1], link, link, nodes[2])


def test_a_plan_that_cannot_end_is_refused():
    subject = case("1f1b")
    for costs in ("H100", "CPU"):
        with pytest.raises(PlanError, match="devices 0, 1 wait for each other"):
            simulate(drop(subject, 0, find(subject, 0, Send)), costs)


def profile(chunks):
    nothing = Rate(0.0, 0.0)
    return Profile(2, "here", chunks, {"*": nothing}, 0.0, Exchange(nothing, Rate(0.0, 1e-9)))


def test_a_chunk_that_was_not_measured():
    subject = case("1f1b")
    with pytest.raises(ConfigError, match=r"no measurement of chunk 'F PP=0 MB=0'.*piper profile"):
        simulate(subject, profile({}))


def test_a_profile_is_used_and_is_a_file(tmp_path):
    subject = case("1f1b")
    keys = {f"{body}@s0=4": 1.0 for body in subject.dag.bodies}
    measured = profile(keys)
    measured.save(tmp_path / "profile.json")
    assert load_profile(tmp_path / "profile.json") == measured
    chunks = [b for b in simulate(subject, measured).devices[0].boxes() if b.op == "compute"]
    assert {b.seconds for b in chunks} == {1.0}


def test_profiles_that_cannot_be_read(tmp_path):
    with pytest.raises(ConfigError, match=r"cannot be read.*piper profile CONFIG -o"):
        load_profile(tmp_path / "none.json")
    (tmp_path / "old.json").write_text('{"version": 1, "latency": 1e-5, "bandwidth": 1e9}')
    with pytest.raises(ConfigError, match=r"version 1, this piper reads version 2; measure again"):
        load_profile(tmp_path / "old.json")
    (tmp_path / "bad.json").write_text("{")
    with pytest.raises(ConfigError, match=r"bad\.json"):
        load_profile(tmp_path / "bad.json")


@pytest.mark.parametrize(("slow", "first"), [(2, 0), (3, 1)])
def test_the_planner_orders_by_given_durations(slow, first):
    """Regions 0 and 1 share a device; the one whose result region *slow* reads comes first."""
    regions = [Region((), 0), Region((), 1), Region((0,), 2), Region((1,), 3), Region((2, 3), 4)]
    placed = [Place({"R": r}, devices=[d]) for r, d in enumerate([0, 0, 1, 2, 3])]
    dag = apply(network(regions, batch_size=2), placed)

    class Uneven(UnitCosts):
        def chunk(self, dag, bindings, chunk):
            return 100.0 if ("R", slow) in chunk.tags else 1.0

    planned = plan(dag, costs=Uneven())
    assert simulate(planned, Uneven()).devices[0].lanes[0].boxes[0].label == f"F R={first}"
    assert simulate(planned, Uneven()).seconds <= simulate(plan(dag), Uneven()).seconds


def test_every_compute_box_says_what_it_waited_for():
    line = simulate(case("1f1b"), "H100")
    nodes = case("1f1b").dag.nodes
    for mine in line.devices:
        first, *others = [b for b in mine.boxes() if b.op == "compute"]
        assert (first.waits_on == ()) == (first.start == 0)
        assert all(box.waits_on for box in others)
        assert {n for b in others for n in b.waits_on} <= {*nodes, -1}


def test_flops_are_counted_on_every_device():
    subject = case("zero 1")
    costs = hardware("H100")
    line = simulate(subject, costs)
    expected = sum(
        body_work(subject.dag.bodies[n.work.body], subject.bindings).flops * len(n.devices)
        for n in subject.dag.chunks()
        if n.work.kind == "call"
    )
    assert line.flops == expected > 0
    assert line.mfu == pytest.approx(expected / (line.seconds * 4 * costs.peak_flops))


@pytest.mark.parametrize("schedule", [schedules.one_f_one_b, schedules.zb_h1])
@pytest.mark.parametrize("shard_params", [False, True])
def test_recomputation_is_the_hardwares_work_but_not_the_models(schedule, shard_params):
    training = captured._transformer(tied=False, stages=2)
    strategy = [
        Place({"PP": 0}, [0, 1]),
        Place({"PP": 1}, [2, 3]),
        Replicate({}, shard_params=shard_params),
        Split({}, num_microbatches=2),
        *schedule(2, 2),
    ]
    plain = simulate(plan(apply(training.dag, strategy)), "H100")
    again = simulate(plan(apply(training.dag, [*strategy, Recompute({})])), "H100")
    assert plain.recomputed == 0
    assert plain.mfu == plain.hfu
    assert again.recomputed > 0.2 * plain.flops
    assert again.flops - again.recomputed == pytest.approx(plain.flops, rel=1e-12)
    whole = again.seconds * 4 * hardware("H100").peak_flops
    assert again.mfu == pytest.approx(plain.flops / whole)
    assert again.hfu == pytest.approx(again.flops / whole)


def test_a_timeline_knows_its_unit():
    assert simulate(case("1f1b")).unit == "F"
    assert simulate(case("1f1b"), "H100").unit == "s"
