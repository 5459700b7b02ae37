"""Tools that tests use and that are no part of the package."""
