"""Steps 2 to 4: one method a file. To add one: its file, a row in METHODS, a row in the contract test."""

from gradwire.compressors.adacomp import AdaComp
from gradwire.compressors.base import Arrival, Compressor, Context, Gather, Message, Outcome, Rounds, Sum
from gradwire.compressors.bf16 import BF16
from gradwire.compressors.dense import Dense
from gradwire.compressors.fp8 import FP8
from gradwire.compressors.fp16 import FP16
from gradwire.compressors.momentum_dct import MomentumDCT
from gradwire.compressors.onebit import OneBit
from gradwire.compressors.powersgd import PowerSGD
from gradwire.compressors.qsgd import QSGD
from gradwire.compressors.randomk import RandomK
from gradwire.compressors.signsgd import SignSGD
from gradwire.compressors.spec import METHODS, compressor_of, from_spec, to_spec
from gradwire.compressors.strom import Strom
from gradwire.compressors.terngrad import TernGrad
from gradwire.compressors.topk import TopK
from gradwire.compressors.vgc import VGC

__all__ = [
    "BF16",
    "FP8",
    "FP16",
    "METHODS",
    "QSGD",
    "VGC",
    "AdaComp",
    "Arrival",
    "Compressor",
    "Context",
    "Dense",
    "Gather",
    "Message",
    "MomentumDCT",
    "OneBit",
    "Outcome",
    "PowerSGD",
    "RandomK",
    "Rounds",
    "SignSGD",
    "Strom",
    "Sum",
    "TernGrad",
    "TopK",
    "compressor_of",
    "from_spec",
    "to_spec",
]
