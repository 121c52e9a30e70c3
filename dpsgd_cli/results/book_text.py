"""Statements of a book about a table, for a person and as JSON values. The file and its rules are in `book.py`."""

from __future__ import annotations

import math
from dataclasses import asdict
from typing import Any

from dpsgd_cli.accounting import book_filter
from dpsgd_cli.common.text_format import count, epsilon_text
from dpsgd_cli.results.book import Book

_MOST_NAMES = 4


def document(book: Book) -> dict[str, Any]:
    """Return the terms, the charges and what is left, as JSON values."""
    left, delta = book.left, book.terms.delta
    charges = [line | {"published": book.released(line["id"])} for line in book.charges]
    return {
        "book": book.identity,
        "last": book.lines[-1]["id"],
        **asdict(book.terms),
        "left_out": book.left_out,
        "limit": asdict(book.terms.limit),
        "left": asdict(left),
        "epsilon_of_next": book_filter.epsilon_of_next(left.mu_squared, delta) if charges else book.terms.epsilon,
        "epsilon_of_ten": book_filter.epsilon_of_next(left.mu_squared, delta, 10),
        "charges": charges,
    }


def lines_of(book: Book) -> list[str]:
    """Return what was spent, by which runs, and what is left, for a person."""
    terms, limit = book.terms, book.terms.limit
    said = [
        f"{book.path}: epsilon {epsilon_text(terms.epsilon)} at delta {terms.delta:g}, {terms.protects}",
        *(f"  table      {name}, SHA-256 {found[:16]}..." for name, found in terms.data.items()),
        f"  held out   {book.left_out or 'not yet fixed: the first run fixes it for all runs'}",
        f"  book       {book.identity}, last entry {book.lines[-1]['id']}",
    ]
    for line in book.charges:
        share, epsilon = line["mu_squared"] / limit.mu_squared, line["epsilon"]
        alone = "no epsilon alone" if epsilon is None else f"alone epsilon {epsilon_text(epsilon)}"
        done = f"{book.released(line['id'])} of {len(line['runs'])} published"
        names = [name.partition(":")[0] for name in line["runs"]]
        more = f" and {len(names) - _MOST_NAMES} more" if len(names) > _MOST_NAMES else ""
        runs = f"{', '.join(names[:_MOST_NAMES])}{more}"
        begin = f"  {line['time'][:16]}  {line['what']:<7} {runs}, {count(line['trials'], 'trial')}"
        said.append(f"{begin}: {alone}, {share:.1%} of the budget; {done}")
    mu_squared = math.fsum(one.mu_squared for one in book.spent)
    leak = math.fsum(one.leak for one in book.spent)
    told = document(book)
    one, ten = epsilon_text(told["epsilon_of_next"]), epsilon_text(told["epsilon_of_ten"])
    return [
        *said,
        f"  spent      {mu_squared / limit.mu_squared:.1%} of the budget (mu^2 {mu_squared:.6g} of"
        f" {limit.mu_squared:.6g}), {leak / limit.leak:.1%} of what runs may use of delta",
        f"  left       one run of epsilon {one}, or ten of epsilon {ten} each, at delta {terms.delta:g} with full or"
        " shuffled batches; runs with sampled batches cost more than their epsilon",
    ]
