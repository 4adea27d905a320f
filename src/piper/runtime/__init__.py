"""Executing plans: bodies as code, random streams, model state, the interpreter, and the worker
around them.
"""
