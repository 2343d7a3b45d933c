"""Where teacher log-probs come from: a model, the policy's own base or an adapter, an average of the policy, the policy
with privileged context, a server, several of them.

A teacher in a Variant is a frozen description (`teacher: {model: {path: ...}}`), registered like a hook.
`build(trainer)` turns it into a `Teacher` that answers for rows of a generation. Every module of this folder is
imported.
"""

import importlib
import pkgutil

from .base import Answer, Question, Teacher

for _module in pkgutil.iter_modules(__path__):
    importlib.import_module(f"{__name__}.{_module.name}")

__all__ = ["Answer", "Question", "Teacher"]
