"""Evolution strategies for PyTorch: train any `nn.Module` from scores alone.

`EGGROLLTrainer` is the algorithm to use, `VanillaESTrainer` the dense one to compare it with, and
`ESTrainer` the base of your own.
"""

from . import fitness, policies
from .base import ESTrainer
from .callbacks import Callback, Checkpoint, EarlyStopping, Evaluate
from .eggroll import EGGROLLTrainer
from .errors import (
    AskTellError,
    CheckpointError,
    ConfigurationError,
    EggrollError,
    EggrollWarning,
    FitnessError,
    NotBatchableError,
    ParameterError,
    PopulationSizeError,
)
from .explain import Report
from .loggers import CSVLogger, JSONLogger, Logger, TensorBoardLogger, WandbLogger
from .optimizers import ClipUp
from .population import Population, population_fitness
from .progress import ProgressBar
from .shaping import centered_rank, standardize, top_directions
from .vanilla import VanillaESTrainer

__version__ = "0.2.0"

__all__ = [
    "AskTellError",
    "CSVLogger",
    "Callback",
    "Checkpoint",
    "CheckpointError",
    "ClipUp",
    "ConfigurationError",
    "EGGROLLTrainer",
    "ESTrainer",
    "EarlyStopping",
    "EggrollError",
    "EggrollWarning",
    "Evaluate",
    "FitnessError",
    "JSONLogger",
    "Logger",
    "NotBatchableError",
    "ParameterError",
    "Population",
    "PopulationSizeError",
    "ProgressBar",
    "Report",
    "TensorBoardLogger",
    "VanillaESTrainer",
    "WandbLogger",
    "__version__",
    "centered_rank",
    "fitness",
    "policies",
    "population_fitness",
    "standardize",
    "top_directions",
]
