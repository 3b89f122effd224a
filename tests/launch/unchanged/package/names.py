"""A module of the same package."""

WHERE = __name__
