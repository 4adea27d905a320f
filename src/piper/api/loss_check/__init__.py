"""Is the loss function a mean over rows, so that microbatches may be averaged? Before any step, the
loss of rows in one piece is held against what those of the same rows in parts combine to, on equal
outputs.

``finding`` says what was found, ``made_up`` makes outputs for many rows from those of one
microbatch, ``measured`` calls the loss function, ``forward`` the model where outputs that were made
up do not do.
"""

from piper.api.loss_check.examine import examine_loss, warn_unless_mean
from piper.api.loss_check.finding import Fault, LossFinding

__all__ = ["Fault", "LossFinding", "examine_loss", "warn_unless_mean"]
