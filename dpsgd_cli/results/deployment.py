"""A record of a published result for the Differential Privacy Deployments Registry, part filled in and part a form.

Its keys are those of the registry's records of September 2026 (opendp/deployments-registry-data), whose schema changes.
"""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import yaml

from dpsgd_cli import __version__
from dpsgd_cli.accounting.adjacency import NEIGHBOURS
from dpsgd_cli.results.guarantee import SUM, neighbours, outside, start_words
from dpsgd_cli.results.result import Row

NAME = "deployment.yaml"
_FORM = "TO FILL IN: "
_HEAD = """\
# A record for the Differential Privacy Deployments Registry (opendp/deployments-registry-data).
# Its keys are those of the registry's records of September 2026; compare them with its schemas/deployments-schema.yaml.
# What the result says is filled in. Answer each "TO FILL IN" before you submit it. The registry's board approves it.
"""


def deployment(document: Row) -> str:
    """Return the record of a private result as YAML, with a form for what it does not say."""
    privacy, unit = document["privacy"], document["privacy"].get("unit")
    hidden = NEIGHBOURS[privacy["adjacency"]]
    stated = {name: privacy[name] for name in ("epsilon", "delta", "rho") if privacy[name] is not None}
    of_training = "" if privacy.get("start") is None else " of the training, and not those of the earlier result"
    began = "" if (start := privacy.get("start")) is None else f" Of both results: {start_words(start)}. {SUM}."
    about: dict[str, Any] = {
        "basic": {
            "name": document["name"],
            "data_curators": [
                {"data_curator_name": f"{_FORM}who publishes the model", "data_curator_type": f"{_FORM}as Nonprofit"}
            ],
            "intended_use": f"{_FORM}what the model is for",
            "data_product_type": "Machine learning model",
            "data_product_region": f"{_FORM}which region the data describe, or whose laws apply",
            "description": f"{_FORM}what the model predicts, and from which data",
            "publication_date": datetime.now(UTC).date().isoformat(),
        },
        "dp_variant": {
            "variant_name": "Approximate DP",
            "data_domain": f"{_FORM}all data sets that could have been trained on, such as the tables of a form",
            "unprotected_quantities": " ".join(privacy["declarations"]) or "None.",
        },
        "privacy_loss": {
            "privacy_unit": "Record-level" if unit is None else "User-level",
            "privacy_unit_details": (
                hidden.hides
                if unit is None
                else f"{hidden.hides_of_users}; a user is all rows with one value of {unit['column']}"
            ),
            "privacy_parameters": stated,
            "privacy_parameters_details": (
                f"{neighbours(privacy)}, proved by the accountant {privacy['accountant']} of dpsgd; `ledger.jsonl` has"
                f" every release{of_training}"
            ),
        },
        "deployment_model": {
            "model_name": "Central",
            "actors": f"{_FORM}who holds the data, and who sees the model",
            "release_type": "One release",
            "release_type_details": f"{_FORM}whether the same data will be used again",
            "data_source_type": "Static",
            "access_type": "Non-interactive",
        },
        "accounting": {
            "post_processing": "Predictions, reports and explanations are computed from the released weights alone.",
            "composition": f"All releases of the ledger together. Scope: {privacy['scope']}.{began}",
        },
        "implementation": {
            "preprocessing_and_hyperparameter_tuning": f"{_FORM}what was tried on the same data, at what price",
            "mechanisms": (
                f"{privacy['batching']} batches; each release is a line of `ledger.jsonl`, with its mechanism and its"
                f" noise. The noise is {privacy['noise_source']}. dpsgd"
                f" {document['provenance'].get('version', __version__)}."
            ),
            "justification": f"{_FORM}why this epsilon. Outside the statement: {' '.join(outside(privacy))}",
        },
        "administrative": {
            "sources": f"{_FORM}where the model is published",
            "registry_authors": [f"{_FORM}who fills this in"],
        },
    }
    record = {"url_slug": document["name"], "status": "Draft", "tier": 3, "deployment": about}
    return _HEAD + yaml.safe_dump(record, sort_keys=False, allow_unicode=True, width=100)
