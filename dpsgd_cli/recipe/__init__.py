"""Recipes: what they may say (`schema`), and how they are read, checked and written (`loading`)."""
