"""Esper: neural networks that grow while they train."""

from importlib.metadata import version

__version__ = version("esper-grow")
