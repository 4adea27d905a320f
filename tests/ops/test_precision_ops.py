from types import SimpleNamespace

import torch

from piper.devices.cpu import CpuDevice
from piper.dtypes import DType
from piper.ops.all_gather import gather
from piper.ops.base import Message, Site
from piper.ops.product import Product
from piper.ops.round_masters import RoundMasters


def site(inputs, outputs):
    return Site(
        node=5,
        stream="compute",
        record=None,
        communicator="",
        group=(0,),
        position=0,
        inputs=inputs,
        outputs=outputs,
        messages=(),
    )


def run(work, inputs, outputs, slots):
    instruction = work.lower(site(inputs, outputs))
    assert (instruction.reads(), instruction.writes()) == (inputs, outputs)
    instruction.bind(SimpleNamespace(slots=slots, device=CpuDevice()))()
    return instruction


def test_masters_are_rounded_in_place():
    master, short = torch.tensor([1.0, 1.001, 1.01]), torch.zeros(3, dtype=torch.bfloat16)
    slots = [short, master]
    work = RoundMasters(("w",))
    instruction = run(work, (1,), (0,), slots)
    assert slots[0] is short
    assert torch.equal(short, master.bfloat16())
    assert work.overwrites() == (("parameter", "w"),)
    assert instruction.describe() == "store_rounded %0 = %1"


def test_a_product_is_float64():
    slots = [torch.tensor(3), torch.tensor(65536.0, dtype=torch.float64), None]
    instruction = run(Product(), (0, 1), (2,), slots)
    assert slots[2].dtype == torch.float64
    assert float(slots[2]) == 3 * 65536
    assert instruction.describe() == "multiply %2 = %0 * %1"


def test_slices_are_rounded_before_they_are_gathered():
    sent = []

    class Communicator:
        def all_gather(self, out, shard):
            sent.append(shard)
            out.copy_(shard.repeat(2))

    masters = [torch.tensor([1.001, 2.0]), torch.tensor([3.0], dtype=torch.bfloat16)]
    messages = [Message((4,), DType.BFLOAT16), Message((2,), DType.BFLOAT16)]
    _, collect = gather(messages, 2, CpuDevice(), Communicator(), masters)
    assert sent[0].dtype == torch.bfloat16
    first, second = collect()
    assert torch.equal(first, torch.tensor([1.001, 2.0, 1.001, 2.0]).bfloat16())
    assert torch.equal(second, torch.tensor([3.0, 3.0]).bfloat16())
