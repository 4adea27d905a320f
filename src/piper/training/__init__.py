"""Training runs from a configuration file: data, metrics, checkpoints and the loop over steps."""
