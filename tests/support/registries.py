"""The registries of the configuration."""

import importlib
import pkgutil

import components.config
from components.config.federation import METHODS
from components.config.registry import Registry
from components.federation.untrained import UntrainedMethod


def config_registries():
    """Every registry that a module of components/config defines, once."""
    registries = {}
    for module in pkgutil.iter_modules(components.config.__path__, "components.config."):
        for value in vars(importlib.import_module(module.name)).values():
            if isinstance(value, Registry):
                registries[value.group] = value
    return list(registries.values())


TRAINED_METHODS = [name for name in METHODS.names() if not issubclass(METHODS.load(name), UntrainedMethod)]
"""The methods that have rounds."""
