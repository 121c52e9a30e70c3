"""Helpers without a topic: sections of a recipe, YAML with line numbers, texts, terminals, interrupts, user code."""
