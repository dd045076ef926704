"""The codec on CUDA: Triton kernels and their launchers. Nothing here waits for the device."""

from __future__ import annotations

from gradwire.codec.gpu.decode import add, decode
from gradwire.codec.gpu.encode import encode, select
from gradwire.codec.gpu.head import checksum, inspect, seal
from gradwire.codec.gpu.pack import pack
from gradwire.codec.gpu.unpack import unpack

__all__ = ["add", "checksum", "decode", "encode", "inspect", "pack", "seal", "select", "unpack"]
