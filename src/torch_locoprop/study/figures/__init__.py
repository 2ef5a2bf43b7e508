"""The figures of the paper and a few more, drawn from runs.

``catalog`` lists the figures and their lines, at the scale of ``protocol`` or ``quick``.
``loss_figures`` makes them: ``run_library`` finds runs, ``run_jobs`` trains missing ones, ``timings``
measures seconds, ``loss_plot`` draws, ``captions`` writes the text. The table of costs is in
``cost_figure``, ``cost_table`` and ``costs``; the picture of matching losses in ``matching_loss``.
"""
