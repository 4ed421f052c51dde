"""Hypothesis profiles, by the environment variable HYPOTHESIS_PROFILE.

short: in `make test`; the same examples each time. long: of `make fuzz` (scripts/fuzz.py), which gives every
round another seed.
"""

import os

from hypothesis import HealthCheck, settings

# No deadline: an example may take any time. The health check of fixtures is off because `device` does not
# change between the examples of a test.
_COMMON = dict(
    deadline=None,
    database=None,
    print_blob=True,
    suppress_health_check=[
        HealthCheck.too_slow,
        HealthCheck.data_too_large,
        HealthCheck.function_scoped_fixture,
        HealthCheck.differing_executors,
    ],
)
settings.register_profile("short", max_examples=25, derandomize=True, **_COMMON)
settings.register_profile("long", max_examples=100, **_COMMON)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "short"))
