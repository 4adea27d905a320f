"""Whether a snapshot fits a model."""

import pytest
import torch

from piper.dtypes import DType
from piper.errors import StateError
from piper.ir.body import TensorSpec
from piper.ir.dag import Buffer, Parameter
from piper.runtime.snapshot import StateSnapshot, check_snapshot

SPEC = TensorSpec((3,), DType.FLOAT64)
MODEL = {"weight": Parameter("weight", SPEC, True, ())}


def test_snapshots_may_leave_out_buffers_that_are_not_persistent():
    buffers = {"mean": Buffer("mean", SPEC, True), "table": Buffer("table", SPEC, False)}
    weight = {"weight": torch.ones(3, dtype=torch.float64)}
    mean = {"mean": torch.zeros(3, dtype=torch.float64)}
    check_snapshot(StateSnapshot(weight, mean, None), MODEL, buffers)
    with pytest.raises(StateError, match="missing buffer 'mean'"):
        check_snapshot(StateSnapshot(weight, {}, None), MODEL, buffers)
