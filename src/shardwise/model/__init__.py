"""Models: where they come from, how they are built without memory, what FSDP gathers together, and their weights.

``build`` makes the module with parameters on the meta device, ``attention`` keeps packed documents
apart, ``weights`` fills the sharded module. Nothing here communicates.
"""

from .build import Unit, build, units
from .weights import initialise, load_weights

__all__ = ["Unit", "build", "initialise", "load_weights", "units"]
