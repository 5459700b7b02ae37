"""The tests. A property of a machine, such as how busy it is, fails none of those by Hypothesis."""

from hypothesis import HealthCheck, settings

settings.register_profile(
    "any machine", deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("any machine")
