"""Directives: one file per kind of rewrite. Importing this package registers every file of the
folder.
"""

import importlib
import pkgutil

for _module in pkgutil.iter_modules(__path__):
    importlib.import_module(f"{__name__}.{_module.name}")
