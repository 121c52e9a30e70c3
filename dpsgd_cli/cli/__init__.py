"""Subcommands, one file each; a file defines `command` and is imported only when that is called."""
