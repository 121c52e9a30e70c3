"""`dpsgd recipe batching`: what each kind of batching hands to the steps of an epoch, and what may be claimed for it.

Not here: the samplers (`core/sampling.py`), the theorems (`privacy/plan.py`, `privacy/accountants/`).
"""

from __future__ import annotations

from collections.abc import Callable

import click

from dpsgd_cli.recipe.batching import BATCHINGS, Batching
from dpsgd_cli.wording import count


@click.command("batching")
@click.option("--records", type=click.IntRange(1, 1000), default=10, show_default=True, help="How many records.")
@click.option("--batch-size", type=click.IntRange(min=1), default=1, show_default=True, help="Expected, for poisson.")
@click.option("--seed", type=click.IntRange(min=0), default=0, show_default=True, help="Of the draws.")
def command(records: int, batch_size: int, seed: int) -> None:
    """Show the batches of one epoch: shuffled, Poisson, and of fixed size.

    Shuffled batches hold every record exactly once. In Poisson batches a record may be missing or appear several
    times, and batches differ in size and may be empty: that is the randomness which amplification by sampling is
    proved for, and which shuffled batches do not have (Yu et al. 2019, Table I). Batches of fixed size are drawn
    anew at each step.

    \b
    Examples:
      dpsgd recipe batching
      dpsgd recipe batching --records 12 --batch-size 3 --seed 1
    """
    if batch_size > records:
        raise click.UsageError(f"--batch-size is {batch_size}, more than the {records} records")
    for kind, batches in draw(records, batch_size, seed).items():
        shown = " ".join(f"[{' '.join(map(str, sorted(batch)))}]" for batch in batches)
        seen = [number for batch in batches for number in batch]
        missing, several = records - len(set(seen)), len({n for n in seen if seen.count(n) > 1})
        click.echo(f"{kind:<8} {shown}")
        click.echo(f"         {count(missing, 'record')} in no batch, {several} in several; {BATCHINGS[kind].claim}")


def draw(records: int, batch_size: int, seed: int) -> dict[Batching, list[list[int]]]:
    """The batches of the first epoch, by kind of batching, each as record numbers from 0."""
    from dpsgd_cli.core.sampling import PoissonSampler, Sampler, ShuffleSampler
    from dpsgd_cli.core.streams import SeededStreams

    streams = SeededStreams(seed)

    found: dict[Batching, list[list[int]]] = {}
    samplers: dict[Batching, Callable[..., Sampler]] = {"shuffle": ShuffleSampler, "poisson": PoissonSampler}
    for kind, sampler_of in samplers.items():
        sampler = sampler_of([streams], records, batch_size)
        drawn = [sampler.batch(step).rows for step in range(sampler.steps_per_epoch)]
        found[kind] = [[] if rows is None else rows[0].tolist() for rows in drawn]
    steps = len(found["shuffle"])
    found["fixed"] = [streams.distinct("fixed", step, records, batch_size).tolist() for step in range(steps)]
    return found
