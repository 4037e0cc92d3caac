# Every public name and its home; `__init__.py` resolves them by these lines.
from keepset import models as models
from keepset.core.budget import Budget as Budget
from keepset.core.feature import Feature as Feature
from keepset.core.feature import Needs as Needs
from keepset.core.features.attention import AttentionColumns as AttentionColumns
from keepset.core.features.attention import PromptQueryAttention as PromptQueryAttention
from keepset.core.features.attention import SecondPass as SecondPass
from keepset.core.features.moments import HiddenMoments as HiddenMoments
from keepset.core.features.moments import QueryMoments as QueryMoments
from keepset.core.features.runtime_features import ModelStatistics as ModelStatistics
from keepset.core.features.runtime_features import OutputProjection as OutputProjection
from keepset.core.features.runtime_features import Perplexity as Perplexity
from keepset.core.features.runtime_features import RecentQueries as RecentQueries
from keepset.core.keep_set import KeepSet as KeepSet
from keepset.core.keep_set import LayerKeepSet as LayerKeepSet
from keepset.core.method import Allocator as Allocator
from keepset.core.method import Method as Method
from keepset.core.method import parameter as parameter
from keepset.core.observation import Observation as Observation
from keepset.core.select import Ranking as Ranking
from keepset.core.traits import Traits as Traits
from keepset.errors import KeepsetError as KeepsetError
from keepset.hf.cache import Cache as Cache
from keepset.recipe import Recipe as Recipe
from keepset.recipe import Schedule as Schedule
from keepset.registry import METHODS as METHODS
from keepset.registry import register as register

__version__: str
