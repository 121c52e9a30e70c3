"""Recipes: their schema (`schema`), and reading, checking and writing them (`loading`)."""
