"""The words for bugs: what they look like, what they are, how they are fixed, where they strike. Any package may import this.

Symptoms, causes and strategies are those of arXiv 2506.10426 (its abstract and reviews of it name them; its counts are not
public); `unknown` is a label too.
"""

from __future__ import annotations

UNKNOWN = "unknown"
SYMPTOMS = {
    "crash": "an exception or a dead process",
    "incorrect functionality": "it runs, and what it computes, keeps or says is wrong",
    "build failure": "it does not install, compile or import",
    "poor performance": "slower, or with more memory, than it should be",
    "CI/CD error": "its own tests or pipelines fail",
    "hang": "it waits and does not go on",
    UNKNOWN: "nothing says",
}
CAUSES = {
    "API misuse": "a library is called as it must not be, or as it was before it changed",
    "incorrect implementation": "the code says another thing than what is meant",
    "configuration error": "an option is read, checked or set wrongly",
    "missing precondition": "a case that was not thought of: nothing, one, too large, not divisible",
    "allocation strategy": "memory or devices are given out wrongly",
    "communication": "a collective or message is missing, of the wrong ranks, or scaled wrongly",
    "distributed tensor": "a tensor is cut or put together wrongly",
    "concurrency": "something is read or written before its time",
    UNKNOWN: "nothing says",
}
STRATEGIES = {
    "conditional logic": "a condition is added, changed or moved",
    "parameter handling": "another argument, group, size, type or factor",
    "version compatibility": "an import, a name or a guard for other versions",
    "reset": "a state is set back, or freed",
    "ordering": "statements change places, or one waits for another",
    "call": "a call is added or taken away",
    "configuration": "settings, dependencies or build files",
    "redesign": "more than a few places change together",
    UNKNOWN: "nothing says",
}
STAGES = {"training": "it learns", "inference": "it answers", UNKNOWN: "both, or nothing says"}
DIMENSIONS = {"symptom": SYMPTOMS, "cause": CAUSES, "strategy": STRATEGIES, "stage": STAGES}
