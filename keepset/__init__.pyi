# Every public name and its home; `__init__.py` resolves names by these lines.
from . import models as models
from .core.budget import Budget as Budget
from .core.feature import Feature as Feature
from .core.feature import Needs as Needs
from .core.features.attention import AttentionColumns as AttentionColumns
from .core.features.attention import PromptQueryAttention as PromptQueryAttention
from .core.features.attention import SecondPass as SecondPass
from .core.features.moments import HiddenMoments as HiddenMoments
from .core.features.moments import QueryMoments as QueryMoments
from .core.features.runtime_features import ModelStatistics as ModelStatistics
from .core.features.runtime_features import OutputProjection as OutputProjection
from .core.features.runtime_features import Perplexity as Perplexity
from .core.features.runtime_features import RecentQueries as RecentQueries
from .core.keep_set import KeepSet as KeepSet
from .core.keep_set import LayerKeepSet as LayerKeepSet
from .core.method import Allocator as Allocator
from .core.method import Method as Method
from .core.method import parameter as parameter
from .core.observation import Observation as Observation
from .core.select import Ranking as Ranking
from .core.traits import Traits as Traits
from .errors import KeepsetError as KeepsetError
from .hf.cache import Cache as Cache
from .hf.conversation import Conversation as Conversation
from .recipe import Recipe as Recipe
from .recipe import Schedule as Schedule
from .registry import METHODS as METHODS
from .registry import register as register

__version__: str
