"""Tensors and other values of checkpoints: made of random bits, and compared bit by bit."""

import argparse

import numpy
import torch

SAFETENSORS_DTYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32,
                      torch.int16, torch.int8, torch.uint8, torch.bool, torch.float8_e4m3fn, torch.float8_e5m2,
                      torch.float8_e4m3fnuz, torch.float8_e5m2fnuz, torch.uint16, torch.uint32, torch.uint64,
                      torch.complex64)


def random_bits(dtype, *sizes):
    """Random bits: any pattern may occur, NaNs included; bools are 0 or 1."""
    numel = torch.Size(sizes).numel()
    if dtype == torch.bool:
        return (torch.randint(0, 2, (numel,)) == 1).view(sizes)
    return torch.randint(0, 256, (numel * dtype.itemsize,), dtype=torch.uint8).view(dtype).view(sizes)


def same_bits(a, b):
    bits = (lambda t: t.contiguous().view(-1).view(torch.uint8))
    return a.dtype == b.dtype and a.shape == b.shape and (a.numel() == 0 or torch.equal(bits(a), bits(b)))


def assert_same(a, b):
    """Nested dicts, lists, tuples and Namespaces; tensors bit by bit, numpy's arrays with their layout."""
    if isinstance(a, torch.Tensor):
        assert isinstance(b, torch.Tensor) and same_bits(a.detach(), b.detach())
    elif isinstance(a, numpy.ndarray):
        assert a.dtype == b.dtype and a.strides == b.strides and numpy.array_equal(a, b)
    elif isinstance(a, argparse.Namespace):
        assert type(b) is argparse.Namespace
        assert_same(vars(a), vars(b))
    elif isinstance(a, dict):
        assert list(a) == list(b)
        for key in a:
            assert_same(a[key], b[key])
    elif isinstance(a, (list, tuple)):
        assert type(a) is type(b) and len(a) == len(b)
        for x, y in zip(a, b):
            assert_same(x, y)
    else:
        assert type(a) is type(b) and a == b
