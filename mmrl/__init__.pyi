"""What `mmrl` offers at its top, for type checkers and editors: the names are imported when they are used."""

from mmrl.api.trainer import Trainer as Trainer
from mmrl.build import load_engine as load_engine
from mmrl.config.schema import load as load

__version__: str
