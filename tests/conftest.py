"""What every test runs under."""

import os

os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # before torch and Numba start threads that would spin

import hypothesis

# The same examples on every run: what fails once fails again. No deadline: kernels compile on their first call.
hypothesis.settings.register_profile(
    "repeatable",
    deadline=None,
    database=None,
    derandomize=True,
    suppress_health_check=[hypothesis.HealthCheck.too_slow],
)
hypothesis.settings.load_profile("repeatable")
