"""The words for bugs: what they look like, what they are, how they are fixed, where they strike. Any package may import this.

Symptoms, causes and strategies are those of arXiv 2506.10426 (its abstract and reviews of it name them; its counts are not
public); `unknown` is a label too.
"""

from soli.core.tables import table

UNKNOWN = "unknown"
DIMENSIONS: dict[str, dict[str, str]] = table(__package__, "taxonomy.toml")
"""Of each its words, and what they mean."""
