"""A record of a published result for the Differential Privacy Deployments Registry, part filled in and part a form.

Its schema: `schemas/deployments-schema.yaml` of opendp/deployments-registry-data.
"""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import yaml

from dpsgd_cli import __version__
from dpsgd_cli.accounting.adjacency import NEIGHBOURS
from dpsgd_cli.results.guarantee import neighbours, outside
from dpsgd_cli.results.result import Row

NAME = "deployment.yaml"
_FORM = "TO FILL IN: "
_HEAD = """\
# A record for the Differential Privacy Deployments Registry (opendp/deployments-registry-data).
# What the result says is filled in. Answer each "TO FILL IN" before you submit it. The registry's board approves it.
"""


def deployment(document: Row) -> str:
    """Return the record of a private result as YAML that is valid by the registry's schema."""
    privacy, unit = document["privacy"], document["privacy"].get("unit")
    hidden = NEIGHBOURS[privacy["adjacency"]]
    stated = {name: privacy[name] for name in ("epsilon", "delta", "rho") if privacy[name] is not None}
    about: dict[str, Any] = {
        "short_name": document["name"],
        "data_curator": f"{_FORM}who publishes the model",
        "intended_use": f"{_FORM}what the model is for",
        "data_product_type": "machine learning model",
        "data_product_description": f"{_FORM}what the model predicts, and from which data",
        "publication_date": datetime.now(UTC).date().isoformat(),
        "dp_flavor": {
            "name": "Approximate DP",
            "data_domain": f"{_FORM}all data sets that could have been trained on, such as the tables of a form",
            "unprotected_quantities": " ".join(privacy["declarations"]) or "None.",
        },
        "privacy_loss": {
            "privacy_unit": "record" if unit is None else f"user: all rows with one value of {unit['column']}",
            "privacy_unit_description": hidden.hides if unit is None else hidden.hides_of_users,
            "privacy_parameters": stated,
            "privacy_parameters_description": (
                f"{neighbours(privacy)}, proved by the accountant {privacy['accountant']} of dpsgd; `ledger.jsonl` has"
                " every release"
            ),
        },
        "model": {
            "model_type": "Central",
            "actors": f"{_FORM}who holds the data, and who sees the model",
            "release_type": "One-shot",
            "release_type_description": f"{_FORM}whether the same data will be used again",
            "interactivity": "Non-interactive",
        },
        "additional_dp_information": {
            "post_processing": "Predictions, reports and explanations are computed from the released weights alone.",
            "composition": f"All releases of the ledger together. Scope: {privacy['scope']}.",
        },
        "implementation": {
            "pre_processing_eda_hyperparameter_tuning": f"{_FORM}what was tried on the same data, at what price",
            "mechanisms": (
                f"{privacy['batching']} batches; each release is a line of `ledger.jsonl`, with its mechanism and its"
                f" noise. The noise is {privacy['noise_source']}. dpsgd"
                f" {document['provenance'].get('version', __version__)}."
            ),
            "justification": f"{_FORM}why this epsilon. Outside the statement: {' '.join(outside(privacy))}",
        },
    }
    record = {"approved": False, "registry_author": f"{_FORM}who fills this in", "deployment": about}
    return _HEAD + yaml.safe_dump(record, sort_keys=False, allow_unicode=True, width=100)
