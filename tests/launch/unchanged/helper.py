"""A module beside the script."""

WHERE = __name__
