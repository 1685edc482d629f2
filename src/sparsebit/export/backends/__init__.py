"""Backends: what a runtime can hold, and what its files look like. One file each; a new file is a new backend."""

from sparsebit.export.backends.base import BACKENDS, Backend, Problem

BACKENDS.discover(__name__)

__all__ = ["BACKENDS", "Backend", "Problem"]
