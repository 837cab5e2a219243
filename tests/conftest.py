"""Settings of the whole suite."""

from hypothesis import settings

settings.register_profile("keyhole", deadline=None)  # the machine may be busy; slow is not wrong
settings.load_profile("keyhole")
