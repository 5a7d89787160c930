"""The exceptions of this library.

    EggrollError
    ├── ConfigurationError (ValueError)      a constructor argument is wrong
    │   └── ParameterError                   … and it is one of the parameters to train
    ├── FitnessError (ValueError)            a fitness returned something that is no number
    ├── PopulationSizeError (ValueError)     as many values as members were expected
    ├── AskTellError (RuntimeError)          ask, evaluate and tell called out of order
    ├── NotBatchableError (RuntimeError)     a fitness cannot be evaluated for all members at once
    └── CheckpointError (RuntimeError)       a checkpoint cannot be read or belongs to another run

Whatever a fitness raises itself reaches the caller unchanged.
"""


class EggrollError(Exception):
    """Base of every exception that this library raises on its own account."""


class ConfigurationError(EggrollError, ValueError):
    """A constructor argument is wrong; the message names it, its value and what was expected."""


class ParameterError(ConfigurationError):
    """A parameter cannot be trained: not the model's, not floating point, on another device."""


class FitnessError(EggrollError, ValueError):
    """A fitness returned something that is no number; the message names the member."""


class PopulationSizeError(EggrollError, ValueError):
    """A tensor does not hold one value for each member."""


class AskTellError(EggrollError, RuntimeError):
    """`ask`, `evaluate` and `tell` were called out of order."""


class NotBatchableError(EggrollError, RuntimeError):
    """A fitness cannot be evaluated for all members at once; the message says what to change."""


class CheckpointError(EggrollError, RuntimeError):
    """A checkpoint is unreadable, or was written by another kind of run; nothing was changed."""


class EggrollWarning(UserWarning):
    """Something works, but not as well as it could; the message says what to change."""
