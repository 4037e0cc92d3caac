from dataclasses import replace

import pytest

from keepset import METHODS, Budget
from keepset.allocators.uniform import Uniform
from keepset.core.method import Allocator
from tests.methods.naive import Shape, kept, observe

# The others look across layers, or say themselves how much every head keeps.
SCORERS = [
    kind
    for kind in METHODS.values()
    if not issubclass(kind, Allocator) and not kind().traits.across_layers and kind().traits.equal_layers
]


@pytest.mark.parametrize("kind", SCORERS, ids=lambda kind: kind.name)
def test_uniform_is_the_scorer_itself(kind: type) -> None:
    scorer = kind()
    wrapped = Uniform(scorer)
    assert wrapped.traits == replace(scorer.traits, needs_budget=True)
    observation = observe(Shape((31, 20), 2, 3, 5, 5))
    for budget in (Budget(9, sinks=1, recent=2), Budget(0.4)):
        plain, uniform = scorer.select(observation, budget), wrapped.select(observation, budget)
        for request in range(2):
            for head in range(2):
                assert kept(uniform, observation, request, head) == kept(plain, observation, request, head)
