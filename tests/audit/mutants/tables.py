"""All mutants and all legal changes, by name."""

from __future__ import annotations

from types import ModuleType

from tests.audit.mutants.documents import DOCUMENTS
from tests.audit.mutants.hostile import HOSTILE
from tests.audit.mutants.legal import LEGAL, LEGAL_OF_DOCUMENTS
from tests.audit.mutants.running import RUNNING
from tests.audit.mutants.scoring import SCORING
from tests.audit.mutants.survivors import SURVIVORS
from tests.audit.mutants.trial import Mutant

MUTANTS: dict[str, Mutant] = {**SCORING, **DOCUMENTS, **RUNNING, **SURVIVORS}


# What no law sees, and why that is as it should be. `survivors` of an audit may be listed here with a reason.
UNSEEN: dict[str, str] = {}


def awaken(name: str, script: ModuleType) -> None:
    """Change a loaded script."""
    others = {**LEGAL, **LEGAL_OF_DOCUMENTS, **HOSTILE}
    change = others[name] if name in others else MUTANTS[name].change
    change(script)
