"""What `dpsgd account` is asked and answers: cases, what can be afforded, rows and tables. Prices are in `privacy/`."""
