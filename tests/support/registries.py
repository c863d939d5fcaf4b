"""The registries of the configuration."""

import importlib
import pkgutil

import components.config
from components.config.registry import Registry


def config_registries():
    """Every registry that a module of components/config defines, once."""
    registries = {}
    for module in pkgutil.iter_modules(components.config.__path__, "components.config."):
        for value in vars(importlib.import_module(module.name)).values():
            if isinstance(value, Registry):
                registries[value.group] = value
    return list(registries.values())
