"""The command line: ``piper train``, ``check``, ``plan``, ``simulate``, ``view``, ``bench``,
``doctor``.
"""
