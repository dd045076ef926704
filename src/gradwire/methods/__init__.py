# mypy: implicit-reexport
"""One method a file, or a folder with kernels of its own; the table that makes it known everywhere.

To add one: its file, a row in METHODS (table.py), a row in the contract test.
"""

from gradwire.methods.base import Arrival as Arrival
from gradwire.methods.base import Compressor as Compressor
from gradwire.methods.base import Context as Context
from gradwire.methods.base import Gather as Gather
from gradwire.methods.base import Message as Message
from gradwire.methods.base import Outcome as Outcome
from gradwire.methods.base import Rounds as Rounds
from gradwire.methods.base import Sum as Sum
from gradwire.methods.table import *  # noqa: F403 every method, METHODS, from_spec, to_spec, compressor_of
