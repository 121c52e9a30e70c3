"""`python -m dpsgd_cli` is `dpsgd`."""

from dpsgd_cli.main import main

if __name__ == "__main__":
    main(prog_name="dpsgd")
