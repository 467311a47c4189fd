"""Measurements of models and of their training; nothing here changes what is measured."""
