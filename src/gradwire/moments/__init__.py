"""Step 1: for every parameter the sum over samples of its squared contribution to the gradient."""

from gradwire.moments.coverage import Row
from gradwire.moments.layers import attention, batch_norm, convolution, embedding, linear, normalization
from gradwire.moments.layers.broadcast import per_sample
from gradwire.moments.recorder import Recorder

# importing a layer's file enters it in the table
LAYER_FILES = (attention, batch_norm, convolution, embedding, linear, normalization)

__all__ = ["Recorder", "Row", "per_sample"]
