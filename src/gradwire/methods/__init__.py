"""Steps 2 to 4: one method a file. To add one: its file, a row in METHODS, a row in the contract test."""

from gradwire.methods.adacomp.definition import AdaComp
from gradwire.methods.base import Arrival, Compressor, Context, Gather, Message, Outcome, Rounds, Sum
from gradwire.methods.bf16 import BF16
from gradwire.methods.dense import Dense
from gradwire.methods.fp8.definition import FP8
from gradwire.methods.fp16 import FP16
from gradwire.methods.momentum_dct.definition import MomentumDCT
from gradwire.methods.onebit import OneBit
from gradwire.methods.powersgd import PowerSGD
from gradwire.methods.qsgd.definition import QSGD
from gradwire.methods.randomk import RandomK
from gradwire.methods.signsgd import SignSGD
from gradwire.methods.strom import Strom
from gradwire.methods.table import METHODS, compressor_of, from_spec, to_spec
from gradwire.methods.terngrad.definition import TernGrad
from gradwire.methods.topk.definition import TopK
from gradwire.methods.vgc import VGC

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
