"""What the ranks of a pool have imported when they begin (pool.py): it takes longer than a case may."""

import importlib

import transformers

import soli.engine.engine
import soli.verify.parity  # noqa: F401

for kind in ("bert", "gpt2", "llama", "mistral", "opt", "qwen2", "t5", "vit"):
    importlib.import_module(f"transformers.models.{kind}.modeling_{kind}")
transformers.utils.logging.set_verbosity_error()
