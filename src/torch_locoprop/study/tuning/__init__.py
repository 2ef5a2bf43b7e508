"""The search for a method's settings: its space, its trials, and the folder that stores them.

``tune`` runs a search. Ranges of settings are in the records of ``torch_locoprop.study.methods``.
"""

from torch_locoprop.study.tuning.campaign import tune

__all__ = ["tune"]
