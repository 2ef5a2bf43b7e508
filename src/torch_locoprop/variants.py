"""Variants of LocoProp: a target and a local loss under one name.

Pass a name from :data:`VARIANTS`, or a :class:`Variant` of your own, to ``LocoProp(variant=...)``.
"""

from torch_locoprop.paper.variants import VARIANTS, Variant

__all__ = ["VARIANTS", "Variant"]
