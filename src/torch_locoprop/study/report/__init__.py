"""The report: one HTML page over any set of runs, with everything it needs inside it.

`runs` reads folders, `series` puts the seeds of a configuration together, `clock` finds what they take
when they are alone, `gather` puts what can be compared side by side, `gallery` draws reconstructions,
and `page` makes the page of all that. What the page does in a browser is in `curves.js`, `ranking.js`
and `page.js`.
"""
