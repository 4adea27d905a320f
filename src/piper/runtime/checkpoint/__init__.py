"""Checkpoints: the state of a training run as a folder of files, which fits every layout.

Each device writes one safetensors file with the parameters, buffers and optimizer state that it
owns, each whole or as a run of its flattened elements. ``index.json`` says where each element of
each tensor is, and holds the rest: the step, the seed, the optimizer's class and options,
checksums. There is no pickle.
"""
