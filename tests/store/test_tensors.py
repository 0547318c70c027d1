"""Tensors as values: what is put comes back, and a value that is none is told."""

import ctypes
import struct
import sys

import numpy as np
import pytest

from mooncake_zmq.store import tensors

ARRAYS = [
    np.arange(24, dtype=np.float32).reshape(2, 3, 4),
    np.arange(24, dtype=np.int64).reshape(4, 6)[::2, ::3],
    np.asfortranarray(np.arange(6, dtype=np.float16).reshape(2, 3)),
    np.array(3.5),
    np.empty((0, 5), np.uint8),
    np.array([True, False]),
    np.array([1 + 2j], ">c16"),
]


@pytest.mark.parametrize("array", ARRAYS, ids=lambda array: f"{array.dtype}{array.shape}")
def test_an_array_comes_back(store, array):
    assert store.put_tensor("k", array) == 0
    got = store.get_tensor("k")
    assert (got.dtype, got.shape) == (array.dtype, array.shape)
    np.testing.assert_array_equal(got, array)
    assert got.flags.writeable


def test_batches_of_arrays_tell_of_each(store):
    arrays = [np.ones(3), "no tensor", np.zeros(2, object), np.full(70_000, 7, np.int32)]
    assert store.batch_put_tensor(["a", "b", "c", "d"], arrays) == [0, -600, -600, 0]
    assert store.put("e", b"no tensor") == 0
    first, *rest, last, other = store.batch_get_tensor(["a", "b", "c", "d", "e"])
    np.testing.assert_array_equal(first, arrays[0])
    np.testing.assert_array_equal(last, arrays[3])
    assert [*rest, other] == [None] * 3
    assert store.batch_put_tensor(["a"], []) == [-600]


def value(array=ARRAYS[0]):
    encoded = tensors.Encoded(array)
    return bytearray(b"".join(tensors_bytes(span) for span in encoded.spans))


def tensors_bytes(span):

    return ctypes.string_at(*span)


DAMAGES = {
    "empty": lambda value: b"",
    "cut in the header": lambda value: value[:20],
    "cut": lambda value: value[:-1],
    "longer": lambda value: value + b"\0",
    "another magic": lambda value: b"x" + value[1:],
    "another library": lambda value: value[:8] + b"jaxxx" + value[13:],
    "too many dimensions": lambda value: value[:13] + b"\xff" + value[14:],
    "a header beyond the end": lambda value: value[:14] + b"\xff\xff" + value[16:],
    "objects": lambda value: value[:16] + b"|O".ljust(16, b"\0") + value[32:],
    "no dtype": lambda value: value[:16] + b"\xff,,".ljust(16, b"\0") + value[32:],
    "a negative length": lambda value: value[:32] + struct.pack("<q", -2) + value[40:],
    "a huge shape": lambda value: value[:32] + struct.pack("<q", 1 << 62) + value[40:],
    "a huge shape of nothing": lambda value: value[:32] + struct.pack("<3q", 0, 1 << 62, 2) + value[56:64],
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_what_is_no_tensor_is_told(damage):
    with pytest.raises(tensors.NotATensor):
        tensors.decode(bytearray(DAMAGES[damage](bytes(value()))))


def test_torchs_tensors_come_back(store):
    torch = pytest.importorskip("torch", reason="needs torch")
    given = [torch.arange(6).reshape(2, 3).T, torch.ones(3, dtype=torch.bfloat16), torch.zeros(0), torch.tensor(2.5)]
    names = [str(number) for number in range(len(given))]
    assert store.batch_put_tensor(names, given) == [0] * len(given)
    for tensor, got in zip(given, store.batch_get_tensor(names), strict=True):
        assert got.dtype == tensor.dtype
        assert torch.equal(got, tensor)


@pytest.mark.parametrize(("dtype", "comes"), [(b"float32", True), (b"bfloat16", False)])
def test_where_torch_is_missing_its_tensors_come_as_arrays(monkeypatch, dtype, comes):
    monkeypatch.setitem(sys.modules, "torch", None)
    array = np.arange(4, dtype=np.float32 if comes else np.uint16)
    content = value(array)
    content[8:13], content[16:32] = b"torch", dtype.ljust(16, b"\0")
    if comes:
        np.testing.assert_array_equal(tensors.decode(content), array)
    else:
        with pytest.raises(tensors.NotATensor, match="bfloat16"):
            tensors.decode(content)
