"""Where the actors of an executor run."""

from ronde.ray.strategy import ColocatedStrategy, PGStrategy, create_placement_group

__all__ = ["ColocatedStrategy", "PGStrategy", "create_placement_group"]
