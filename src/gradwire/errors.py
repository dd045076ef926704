"""What is raised, in words that say what to do.

An error of the exchange reaches the user through DDP's future, which makes a RuntimeError with the same text of it.
"""


class GradwireError(RuntimeError):
    """Base of what gradwire raises while it runs."""


class AttachError(GradwireError):
    """This model cannot be attached as it is."""


class DisagreementError(GradwireError):
    """The ranks do not have the same model, version or compressor."""


class MessageError(GradwireError):
    """Bytes from another rank are not a message for this bucket."""


class CheckpointError(GradwireError):
    """A checkpoint does not fit this model or is damaged."""


class MomentError(GradwireError):
    """A second moment cannot be computed exactly and `strict` was asked for."""


SECOND_BACKWARD = (
    "a second synced backward came before an optimizer step: its gradient would mix with what was already exchanged. "
    "If you accumulate, or another model's loss runs through this one (a GAN), put that forward and its backward both "
    "under `with model.no_sync():` (DDP decides in the forward), or set requires_grad_(False) on this model while they "
    "run. If you skipped an optimizer step on purpose, or update the parameters through .data without a torch "
    "optimizer, call wire.skip_step() after the backward."
)
WRAPPED_ANEW = (
    "this DistributedDataParallel model is not attached any more: its net was wrapped anew, and the newer model "
    "attached. Train that one"
)
