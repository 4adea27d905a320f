import hashlib
import math

import pytest
import torch
from safetensors.torch import load_file

from piper.errors import CheckpointError
from piper.runtime.checkpoint.values import decode, encode
from piper.runtime.tensor_file import TensorSpec, file_digest, in_file_order, write_tensors

TENSORS = {
    "half": torch.randn(3).bfloat16(),
    "flags": torch.tensor([True, False, True]),
    "wide": torch.randn(2, 3, dtype=torch.float64),
    "scalar": torch.tensor(1.5),
    "empty": torch.empty(0, 4),
    "strided": torch.randn(4, 3).t(),
    "count": torch.tensor(7),
}


def written(path, tensors):
    specs = in_file_order(TensorSpec(n, t.dtype, tuple(t.shape)) for n, t in tensors.items())
    return write_tensors(path, specs, (tensors[spec.key] for spec in specs))


def test_a_file_is_safetensors(tmp_path):
    path = tmp_path / "a.safetensors"
    nbytes, digest = written(path, TENSORS)
    found = load_file(path)
    assert found.keys() == TENSORS.keys()
    for name, tensor in TENSORS.items():
        assert found[name].dtype == tensor.dtype
        assert torch.equal(found[name], tensor), name
    assert nbytes == path.stat().st_size
    assert digest == hashlib.sha256(path.read_bytes()).hexdigest() == file_digest(path, nbytes)[1]


def test_complex_numbers_are_pairs(tmp_path):
    path, tensor = tmp_path / "a.safetensors", torch.randn(2, 3, dtype=torch.complex128)
    written(path, {"a": tensor})
    assert torch.equal(torch.view_as_complex(load_file(path)["a"]), tensor)


def test_a_file_is_never_overwritten(tmp_path):
    (tmp_path / "a").write_bytes(b"old")
    with pytest.raises(FileExistsError):
        written(tmp_path / "a", TENSORS)
    assert (tmp_path / "a").read_bytes() == b"old"


@pytest.mark.parametrize(
    "value",
    [
        None,
        True,
        3,
        0.1,
        math.inf,
        -math.inf,
        "text",
        (0.9, 0.999),
        [1, (2, [3.0, None])],
        {"a": {"tuple": [1]}, "float": "inf"},
    ],
)
def test_values_come_back_as_they_were(value):
    import msgspec

    found = decode(msgspec.json.decode(msgspec.json.encode(encode(value, "it"))))
    assert found == value
    assert type(found) is type(value)


@pytest.mark.parametrize(
    "tensor",
    [torch.tensor(0.1), torch.tensor([[1, 2], [3, 4]]), torch.tensor([math.inf, 0.3]).double()],
)
def test_small_tensors_are_values(tensor):
    found = decode(encode(tensor, "it"))
    assert found.dtype == tensor.dtype
    assert torch.equal(found, tensor)


def test_a_nan_is_a_value():
    assert math.isnan(decode(encode(math.nan, "it")))


@pytest.mark.parametrize("value", [object(), {1: 2}, {3}, [lambda: 0], 1j])
def test_anything_else_is_refused_by_name(value):
    with pytest.raises(CheckpointError, match=r"metadata.'x'. is a .*, which a checkpoint cannot"):
        encode(value, "metadata['x']")
