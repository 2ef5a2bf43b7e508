"""Training one model with one method, and many models together.

``runner`` runs a ``config`` and stores it in a ``run_folder``; ``run_result`` reads it back.
``population_run`` trains runs that differ in numbers only as one batched ``population``, and
``matrix_population`` those of methods that factorise or orthogonalise matrices. The search for settings
is in ``torch_locoprop.study.tuning``.
"""
