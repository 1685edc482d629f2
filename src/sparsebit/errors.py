"""Every error a user can cause has a type here; each message says where, what, and what to do."""


class SparsebitError(Exception):
    """Base of all errors that Sparsebit raises on purpose."""


class ConfigError(SparsebitError, ValueError):
    """A configuration that cannot be used; the message starts with the full key path."""


class RegistryError(SparsebitError, KeyError):
    """A name nobody registered, or one that is taken; the message names its neighbours."""

    def __str__(self) -> str:  # KeyError shows the repr of its argument: quotes and escapes
        return str(self.args[0]) if self.args else ""


class TraceError(SparsebitError, RuntimeError):
    """A model that torch.fx cannot trace; names the module and the way out."""


class GraphError(SparsebitError, RuntimeError):
    """A pass that broke the graph or changed its output."""


class CalibrationError(SparsebitError, RuntimeError):
    """Calibration without data, with NaN or Inf, in the wrong order, or twice."""


class ExportError(SparsebitError, RuntimeError):
    """A model that cannot be written, or a file that does not do what the model did."""
