"""One file per subcommand; each exposes `command` and is imported only when it is called."""
