"""Steps 2 to 4: one method a file. To add one: its file, a row in METHODS, a row in the contract test."""

from gradwire.compressors.base import Arrival, Compressor, Context, Gather, Message, Outcome, Rounds, Sum
from gradwire.compressors.bf16 import BF16
from gradwire.compressors.dense import Dense
from gradwire.compressors.fp16 import FP16
from gradwire.compressors.spec import METHODS, from_spec, to_spec
from gradwire.compressors.vgc import VGC

__all__ = [
    "BF16",
    "FP16",
    "METHODS",
    "VGC",
    "Arrival",
    "Compressor",
    "Context",
    "Dense",
    "Gather",
    "Message",
    "Outcome",
    "Rounds",
    "Sum",
    "from_spec",
    "to_spec",
]
