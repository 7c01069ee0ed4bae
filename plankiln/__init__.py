"""Recipes are fired into plans: one YAML recipe, one verified bundle per processor."""

__version__ = "0.1.0"
