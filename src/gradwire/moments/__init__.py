"""Step 1, moments: for every parameter the sum over samples of its squared contribution to the gradient."""

from gradwire.moments import attention, batch_norm, compiled_layers, convolution, embedding, linear, normalization
from gradwire.moments.broadcast import per_sample
from gradwire.moments.coverage import Row
from gradwire.moments.recorder import Recorder

# importing a layer's file enters it in the registry, or its operators with torch
LAYER_FILES = (attention, batch_norm, compiled_layers, convolution, embedding, linear, normalization)

__all__ = ["Recorder", "Row", "per_sample"]
