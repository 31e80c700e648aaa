"""What all tests share: how long a case takes is nothing that they judge."""

from hypothesis import settings

settings.register_profile("patient", deadline=None)
settings.load_profile("patient")
