"""One error type for each kind of mistake; each message gives place, cause and remedy."""


class SparsebitError(Exception):
    """Base of all errors that Sparsebit raises on purpose."""


class ConfigError(SparsebitError, ValueError, AssertionError):
    """A configuration that cannot be used; the message starts with the full key path.

    It is an AssertionError too, because the original checked its configs with `assert`. One error lists all
    problems of a config, so every ConfigError has this base.
    """


class _PlainKeyError(KeyError):
    """A KeyError that shows its message. KeyError itself shows the repr: quotes and escapes."""

    def __str__(self) -> str:
        return str(self.args[0]) if self.args else ""


class UnknownOptionError(ConfigError, _PlainKeyError):
    """A config key that is not defined; a KeyError, as with the configs of the original."""


class FrozenConfigError(ConfigError, AttributeError):
    """A change of a frozen config; an AttributeError, as with the configs of the original."""


class RegistryError(SparsebitError, _PlainKeyError):
    """A name that is not registered, or one that is taken; the message lists close names."""


class TraceError(SparsebitError, RuntimeError):
    """A model that torch.fx cannot trace; names the module and the way out."""


class GraphError(SparsebitError, RuntimeError):
    """A pass that broke the graph or changed its output."""


class CalibrationError(SparsebitError, RuntimeError):
    """Calibration without data, with NaN or Inf, in the wrong order, or twice."""


class ExportError(SparsebitError, RuntimeError):
    """A model that cannot be written, or a file that computes something else than the model."""


class ReaderError(ExportError):
    """A checkpoint was written, but a program that should run it does not; `report` is that of the run."""

    def __init__(self, message: str, report: object = None) -> None:
        super().__init__(message)
        self.report = report
