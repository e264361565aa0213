"""Blueprints: what can be grown. To add one, write a function and list it in the catalogue."""
