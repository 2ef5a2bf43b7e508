"""The report: one HTML page over any set of runs, as a single file without outside resources.

``runs`` reads folders, ``series`` groups the seeds of a configuration, ``clock`` finds timings,
``comparison`` groups comparable series, ``gallery`` draws reconstructions, and ``page`` writes the
page. Its scripts are ``curves.js``, ``ranking.js``, ``address.js`` and ``page.js``. Figures for print
are in ``torch_locoprop.study.figures``.
"""
