"""Blueprints of seeds. To add one, write a factory and add it to the catalogue."""
