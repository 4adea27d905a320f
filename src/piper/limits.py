"""How large the things may be that a file or a caller names by a number.

A number costs its writer a few bytes, whatever it says. Each bound is far above what anybody runs
and far below what a machine cannot hold, so that an absurd number is answered at once, by its name
and place, and not by hours of work or by the system that ends the process.
"""

MAX_DEVICES = 1 << 20
"""Devices of a job. The largest clusters have some hundred thousand."""

MAX_CELLS = 1 << 17
"""Stages times microbatches of a schedule: each is two directives at least, and four chunks or more
of the training DAG, of which a planner does some ten thousand per second.
"""

MAX_MICROBATCHES = 1 << 17
"""Microbatches of a replica, over all splits: as for :data:`MAX_CELLS`, with one stage."""

MAX_LAYERS = 10_000
"""Layers of a model of ours: one that is captured has operators by the hundred in each."""

MAX_WIDTH = 1 << 24
"""Any other size of a model of ours: its matrices have the square of it."""

MAX_NUMBER = (1 << 63) - 1
"""Of whole numbers: what a tensor's size, an offset in a file or a counter may be in PyTorch."""

MAX_DIMS = 64
"""Dimensions of a tensor: PyTorch has no more."""

MAX_EXPRESSION = 4_000
"""Characters of a size expression. Those that capture writes have a few dozen."""

MAX_EXPRESSION_DEPTH = 100
"""Operations inside each other in a size expression. A parser calls itself once for each."""

MAX_NESTING = 8
"""Lists inside each other in an operator's argument, where no operator of PyTorch takes more than
two.
"""

MAX_DEPTH = 64
"""Values inside each other in a file (JSON or TOML). Ours have less than twenty."""

MAX_TEXT = 1_024
"""Characters of a text argument of an operator: all that there are name a mode."""

MAX_LITERAL = 1 << 20
"""Elements of a tensor that is written out in a body; capture writes scalars and short lists."""

MAX_FILE = 4 << 30
"""Bytes of a file that is read whole. A plan of a million instructions has some hundred million."""

MAX_CONFIG = 1 << 20
"""Characters of a configuration, which Python's own parser reads, slowly."""
