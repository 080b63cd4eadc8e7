"""The whole table of cases: importing the modules enters theirs."""

from tests.exactness.case import CASES
from tests.exactness.cases import (
    attributes,  # noqa: F401
    batches,  # noqa: F401
    between,  # noqa: F401
    changing_data,  # noqa: F401
    counters,  # noqa: F401
    data,  # noqa: F401
    draws,  # noqa: F401
    errors,  # noqa: F401
    held,  # noqa: F401
    hidden,  # noqa: F401
    hyperparameters,  # noqa: F401
    identities,  # noqa: F401
    libraries,  # noqa: F401
    memories,  # noqa: F401
    models,  # noqa: F401
    optimizers,  # noqa: F401
    own_steps,  # noqa: F401
    questions,  # noqa: F401
    schedulers,  # noqa: F401
    streams,  # noqa: F401
    structure,  # noqa: F401
    switches,  # noqa: F401
    traced,  # noqa: F401
    tuning,  # noqa: F401
    whole_steps,  # noqa: F401
    world,  # noqa: F401
)

__all__ = ["CASES"]
