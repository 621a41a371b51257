"""Drafter models: published configs, modules, loading and saving."""
