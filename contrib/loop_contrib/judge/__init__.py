"""A model that grades what no program can: ``judge``, a parameter of rewards."""
