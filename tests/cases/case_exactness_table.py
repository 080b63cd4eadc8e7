"""The whole table of cases: importing the modules enters theirs."""

import case_exactness_attributes  # noqa: F401
import case_exactness_batches  # noqa: F401
import case_exactness_between  # noqa: F401
import case_exactness_counters  # noqa: F401
import case_exactness_data  # noqa: F401
import case_exactness_draws  # noqa: F401
import case_exactness_held  # noqa: F401
import case_exactness_hidden  # noqa: F401
import case_exactness_memories  # noqa: F401
import case_exactness_models  # noqa: F401
import case_exactness_optimizers  # noqa: F401
import case_exactness_schedulers  # noqa: F401
import case_exactness_streams  # noqa: F401
import case_exactness_structure  # noqa: F401
import case_exactness_traced  # noqa: F401
import case_exactness_tuning  # noqa: F401
import case_exactness_world  # noqa: F401
from case_exactness import CASES

__all__ = ["CASES"]
