"""Our orders are those of torch.distributed.pipelining, where it accepts the counts."""

import pytest
import torch
import torch.distributed.pipelining.schedules as torch_schedules
from tests.schedules.unit_time import chunks, groups

from piper.schedules import (
    dualpipev,
    gpipe,
    interleaved_one_f_one_b,
    interleaved_zero_bubble,
    looped_bfs,
    one_f_one_b,
    zb_h1,
    zbv,
)


class RecordingStage:
    """Enough of a PipelineStage to build a schedule without processes and note what it runs."""

    def __init__(self, index, num_stages, num_ranks):
        self.stage_index, self.num_stages = index, num_stages
        self.group_size, self.group_rank, self.group = num_ranks, index % num_ranks, None
        self.is_first, self.is_last = index == 0, index == num_stages - 1
        self.has_backward = True
        self.submod = torch.nn.Identity()
        self.stage_index_to_group_rank = {}
        self.ran = []

    def forward_one_chunk(self, microbatch, *_args, **_kwargs):
        self.ran.append(("F", self.stage_index, microbatch))

    def backward_one_chunk(self, microbatch, **_kwargs):
        self.ran.append(("B", self.stage_index, microbatch))

    def no_messages(self, _microbatch):
        return []

    get_fwd_recv_ops = get_fwd_send_ops = get_bwd_recv_ops = get_bwd_send_ops = no_messages

    def perform_reduce_grad(self, _scale):
        pass


def ran_by_single(schedule_class, num_stages, num_microbatches):
    """What each rank of a schedule with one stage per rank executes."""
    ranks = []
    for index in range(num_stages):
        stage = RecordingStage(index, num_stages, num_stages)
        schedule = schedule_class(stage, num_microbatches)
        schedule._initialize_stage = lambda *_: None
        schedule._step_microbatches([()] * num_microbatches, [{}] * num_microbatches)
        ranks.append(stage.ran)
    return ranks


TORCH_PASSES = {"F": "F", "B": "B", "I": "BI", "W": "BW"}


def planned_in_groups(schedule_class, num_ranks, num_virtual, num_microbatches):
    """The groups of each rank of a schedule with several stages per rank, idle steps left out."""
    stages = [
        RecordingStage(v * num_ranks, num_ranks * num_virtual, num_ranks)
        for v in range(num_virtual)
    ]
    schedule = schedule_class(stages, num_microbatches, loss_fn=lambda *_: None)
    return [
        [
            [
                (TORCH_PASSES[a.computation_type.value], a.stage_index, a.microbatch_index)
                for a in action.sub_actions or [action]
            ]
            for action in schedule.pipeline_order[rank]
            if action is not None
        ]
        for rank in range(num_ranks)
    ]


def planned_by_multi(*schedule):
    """As :func:`planned_in_groups`, for a schedule whose groups have one member."""
    return [[chunk for (chunk,) in rank] for rank in planned_in_groups(*schedule)]


@pytest.mark.parametrize("num_stages", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("num_microbatches", [1, 2, 3, 4, 7, 16])
def test_gpipe(num_stages, num_microbatches):
    expected = ran_by_single(torch_schedules.ScheduleGPipe, num_stages, num_microbatches)
    assert [chunks(o) for o in gpipe(num_stages, num_microbatches)] == expected


@pytest.mark.parametrize("num_stages", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("extra", [0, 1, 2, 5, 16])
def test_one_f_one_b(num_stages, extra):
    count = num_stages + extra  # torch refuses fewer microbatches than stages
    expected = ran_by_single(torch_schedules.Schedule1F1B, num_stages, count)
    assert [chunks(o) for o in one_f_one_b(num_stages, count)] == expected


@pytest.mark.parametrize("num_virtual", [1, 2, 3])
@pytest.mark.parametrize(
    ("num_ranks", "num_microbatches"),
    # M a multiple of R; rounds longer than R (4, 10: 5 + 5); M < R.
    [(1, 3), (2, 2), (2, 8), (4, 4), (4, 16), (4, 10), (4, 6), (3, 8), (4, 3), (4, 1), (5, 2)],
)
def test_interleaved(num_ranks, num_virtual, num_microbatches):
    expected = planned_by_multi(
        torch_schedules.ScheduleInterleaved1F1B, num_ranks, num_virtual, num_microbatches
    )
    ours = interleaved_one_f_one_b(num_ranks, num_virtual, num_microbatches)
    assert [chunks(o) for o in ours] == expected


@pytest.mark.parametrize("num_virtual", [1, 2, 3])
@pytest.mark.parametrize(("num_ranks", "num_microbatches"), [(1, 3), (2, 5), (4, 8), (4, 2)])
def test_looped_bfs(num_ranks, num_virtual, num_microbatches):
    expected = planned_by_multi(
        torch_schedules.ScheduleLoopedBFS, num_ranks, num_virtual, num_microbatches
    )
    assert [chunks(o) for o in looped_bfs(num_ranks, num_virtual, num_microbatches)] == expected


@pytest.mark.parametrize("num_virtual", [1, 2, 3])
@pytest.mark.parametrize(
    ("num_ranks", "num_microbatches"),
    # Not here: (4, 9) and others whose rounds would be of unequal size, which torch refuses.
    [(1, 3), (2, 2), (2, 8), (4, 4), (4, 16), (4, 10), (3, 8), (8, 16), (4, 3), (4, 1), (5, 2)],
)
def test_interleaved_zero_bubble(num_ranks, num_virtual, num_microbatches):
    expected = planned_by_multi(
        torch_schedules.ScheduleInterleavedZeroBubble, num_ranks, num_virtual, num_microbatches
    )
    ours = interleaved_zero_bubble(num_ranks, num_virtual, num_microbatches)
    assert [chunks(o) for o in ours] == expected
    if num_virtual == 1:
        assert zb_h1(num_ranks, num_microbatches) == ours


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("num_microbatches", [1, 2, 3, 4, 7, 15, 16, 20])
def test_zbv(num_ranks, num_microbatches):
    expected = planned_by_multi(
        torch_schedules.ScheduleZBVZeroBubble, num_ranks, 2, num_microbatches
    )
    assert [chunks(o) for o in zbv(num_ranks, num_microbatches)] == expected


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("extra", [0, 1, 2, 4, 12])
def test_dualpipev(num_ranks, extra):
    count = 2 * num_ranks + extra
    expected = planned_in_groups(torch_schedules.ScheduleDualPipeV, num_ranks, 2, count)
    assert [groups(o) for o in dualpipev(num_ranks, count)] == expected
