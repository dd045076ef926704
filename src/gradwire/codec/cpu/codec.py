"""The codec on a CPU: machine code by Numba, shared among as many threads as torch itself would use."""

from __future__ import annotations

from gradwire.codec.cpu.decode import add, decode, unpack
from gradwire.codec.cpu.encode import encode, select
from gradwire.codec.cpu.head import checksum, inspect, seal
from gradwire.codec.cpu.pack import pack

__all__ = ["add", "checksum", "decode", "encode", "inspect", "pack", "seal", "select", "unpack"]
