"""gradwire decides what of a gradient goes over the wire."""

__version__ = "0.1.0"
