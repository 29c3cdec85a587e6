"""Families of transformers by a configuration's `model_type`: whose dimensions are all that there is to know.

Each was built by transformers from its own defaults and has the parameters that its dimensions give, within 3%
(tests/test_configurations.py does it again). Whether an MLP has a gate, and so a third matrix (Shazeer, arXiv 2002.05202), is the
family's and not its activation's: StarCoder2 and Gemma say the same one. What a family's program does where a
configuration does not say `tie_word_embeddings` is here too.
"""

from __future__ import annotations

from dataclasses import dataclass

from soli.core.tables import table


@dataclass(frozen=True)
class Family:
    """What a family's program does."""

    gated: bool
    tied: bool


FAMILIES = {
    kind: Family(one["gated"], one["tied"])
    for one in table(__package__, "families.toml")["family"]
    for kind in one["of"]
}
