"""The package's own version, which a run from its source has too. Imports nothing: `soli env` asks where torch is broken."""

SOLI = "0.1.0"
